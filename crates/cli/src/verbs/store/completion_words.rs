//! The words that a shell offers: verbs, options, values, images and containers.

use clap::{Arg, Command, ValueHint};

use crate::verbs::command_words::{CommandWords, find, positional};
use crate::verbs::groups::commands;

/// The kind of thing that an argument names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NameKind {
    Image,
    Container,
}

use NameKind::{Container, Image};

/// Arguments that are names of images or containers: the verbs, the argument, and the kind of its names.
const NAMES: &[(&[&str], &str, &[NameKind])] = &[
    (&["run", "create", "bundle", "trace", "images", "untag"], "image", &[Image]),
    (
        &["show", "history", "tag", "push", "sign", "convert", "index", "filter", "mount"],
        "name",
        &[Image],
    ),
    (&["rmi", "verify", "du", "save", "untag"], "names", &[Image]),
    (&["inspect"], "names", &[Container, Image]),
    (&["merge"], "images", &[Image]),
    (&["ls", "tree", "dump"], "target", &[Image]),
    (&["cat"], "targets", &[Image]),
    (&["diff"], "old", &[Image, Container]),
    (&["diff"], "new", &[Image]),
    (&["export"], "name", &[Image, Container]),
    (&["attach", "exec", "commit", "fork", "port", "rollback"], "container", &[Container]),
    (&["kill", "start", "restart", "stop", "wait", "logs"], "containers", &[Container]),
    (&["rm"], "names", &[Container]),
];

/// A word that a shell offers, and its kind.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct OfferedWord {
    pub(crate) word: String,
    pub(crate) about: String,
}

/// The words that a shell offers, or one of the lists that shells make themselves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Offer {
    Words(Vec<OfferedWord>),
    Names(&'static [NameKind]),
    /// The shell's own list of files.
    Files,
    Directories,
    /// The shell's own list of programs.
    Programs,
}

impl Offer {
    const NOTHING: Self = Self::Words(Vec::new());
}

/// Returns what to offer for the word that follows the others. It may be empty.
pub(crate) fn offer(before: &CommandWords<'_>, last: &str) -> Offer {
    let command = before.command;
    if before.is_unknown {
        return Offer::NOTHING;
    }
    if let Some(option) = before.awaited {
        return values(command, option, "");
    }
    if before.has_options
        && let Some((name, _)) = last.split_once('=')
        && let Some(option) = find(command, name)
    {
        return values(command, option, &format!("{name}="));
    }
    if before.has_options && last.starts_with('-') {
        return Offer::Words(options(command));
    }
    if command.has_subcommands() {
        return Offer::Words(verbs(command));
    }
    // Such as `image ls`; the actions of `system` are values of its argument.
    let of_group = commands(command.get_name());
    if before.place == 0 && command.get_name() != "system" && !of_group.is_empty() {
        let word = |it: &str| OfferedWord { word: it.to_owned(), about: String::new() };
        return Offer::Words(of_group.into_iter().map(word).collect());
    }
    match positional(command, before.place) {
        Some(argument) => values(command, argument, ""),
        None => Offer::NOTHING,
    }
}

fn options(command: &Command) -> Vec<OfferedWord> {
    let shown = command.get_arguments().filter(|it| !it.is_hide_set());
    let mut words: Vec<_> = shown
        .flat_map(|it| {
            let about = first_sentence(&it.get_help().map(ToString::to_string).unwrap_or_default());
            let long = it.get_long().map(|long| format!("--{long}"));
            let short = it.get_short().map(|short| format!("-{short}"));
            let names = long.into_iter().chain(short);
            names.map(move |word| OfferedWord { word, about: about.clone() })
        })
        .collect();
    words.sort_unstable();
    words
}

fn verbs(command: &Command) -> Vec<OfferedWord> {
    let shown = command.get_subcommands().filter(|it| !it.is_hide_set());
    let told = |it: &Command| OfferedWord {
        word: it.get_name().to_owned(),
        about: it.get_about().map(ToString::to_string).unwrap_or_default(),
    };
    shown.map(told).collect()
}

/// Returns what to offer for the value of an argument, as a word that begins with `prefix`.
fn values(command: &Command, argument: &Arg, prefix: &str) -> Offer {
    let possible = argument.get_possible_values();
    if !possible.is_empty() {
        let shown = possible.iter().filter(|it| !it.is_hide_set());
        let words = shown.map(|it| OfferedWord {
            word: format!("{prefix}{}", it.get_name()),
            about: it.get_help().map(|it| first_sentence(&it.to_string())).unwrap_or_default(),
        });
        return Offer::Words(words.collect());
    }
    let id = argument.get_id().as_str();
    let is_name =
        |(verbs, name, _): &&(&[&str], &str, _)| *name == id && verbs.contains(&command.get_name());
    if let Some((.., kinds)) = NAMES.iter().find(is_name) {
        return Offer::Names(kinds);
    }
    match argument.get_value_hint() {
        ValueHint::DirPath => Offer::Directories,
        ValueHint::AnyPath | ValueHint::FilePath | ValueHint::ExecutablePath => Offer::Files,
        _ if id == "volume" || id == "source" => Offer::Files,
        _ if ["runtime", "entrypoint"].contains(&id) => Offer::Programs,
        _ => Offer::NOTHING,
    }
}

fn first_sentence(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    line.split(['.', ';']).next().unwrap_or_default().to_owned()
}

#[cfg(all(test, feature = "serve"))]
mod tests {
    use super::*;

    fn built() -> Command {
        let mut command = crate::verbs::command();
        command.build();
        command
    }

    fn words(line: &str) -> Offer {
        let (before, last) = line.rsplit_once(' ').unwrap_or(("", line));
        let before: Vec<_> = before.split_whitespace().collect();
        offer(&CommandWords::read(&built(), &before), last)
    }

    #[test]
    fn rows_are_arguments_of_verbs() {
        let command = built();
        for (verbs, name, _) in NAMES {
            for verb in *verbs {
                let verb = command.find_subcommand(verb).expect("a verb");
                let has = verb.get_positionals().any(|it| it.get_id() == *name);
                assert!(has, "{}: {name}", verb.get_name());
            }
        }
    }

    #[test]
    fn names_are_offered_where_they_are_taken() {
        for (line, expect) in [
            ("run ", &[Image][..]),
            ("run -it --name a ", &[Image]),
            ("run -v /a:/b --memory=1g d", &[Image]),
            ("--store /a run ", &[Image]),
            ("rmi a ", &[Image]),
            ("exec ", &[Container]),
            ("exec -it w", &[Container]),
            ("rm -f a b ", &[Container]),
            ("stop -- ", &[Container]),
            ("diff ", &[Image, Container]),
            ("cat a:/b ", &[Image]),
            ("kill -s HUP ", &[Container]),
            ("inspect ", &[Container, Image]),
            ("save -o x ", &[Image]),
        ] {
            assert_eq!(words(line), Offer::Names(expect), "{line}");
        }
        for line in ["run a ", "run a -", "run --name ", "run -e ", "exec a sh -", "tag a ", "x y "]
        {
            assert_eq!(words(line), Offer::NOTHING, "{line}");
        }
        for line in ["run --env-file ", "run --env-file=", "run -v ", "cp ", "cp a ", "load -i "] {
            assert_eq!(words(line), Offer::Files, "{line}");
        }
        assert_eq!(words("--store "), Offer::Directories);
        assert_eq!(words("man "), Offer::Directories);
    }

    #[test]
    fn words_are_those_that_help_shows() {
        let check = |line: &str, expect: &str, is_offered: bool| {
            let Offer::Words(all) = words(line) else { panic!("{line}") };
            let has = all.iter().any(|it| it.word == expect);
            assert_eq!(has, is_offered, "{line}: {expect}: {all:?}");
        };
        check("", "run", true);
        check("r", "rmi", true);
        check("help ", "run", true);
        check("image ", "ls", true);
        check("container ", "exec", true);
        check("system ", "prune", true);
        check("completions ", "fish", true);
        check("run -", "--name", true);
        check("run -", "--store", true);
        check("run -", "--json", false);
        check("images -", "--json", true);
        check("run --pull ", "always", true);
        check("run --pull=", "--pull=always", true);
        check("-", "--version", true);
    }

    /// A hidden option is for other programs, or for those that come from another tool.
    #[test]
    fn no_hidden_option_is_offered() {
        let command = built();
        let mut count = 0;
        for verb in command.get_subcommands() {
            let words = CommandWords::read(&command, &[verb.get_name()]);
            let Offer::Words(all) = offer(&words, "-") else { continue };
            for hidden in verb.get_arguments().filter(|it| it.is_hide_set()) {
                count += 1;
                let long = format!("--{}", hidden.get_long().unwrap_or_default());
                assert!(all.iter().all(|it| it.word != long), "{}: {long}", verb.get_name());
            }
        }
        assert!(count > 0);
    }
}
