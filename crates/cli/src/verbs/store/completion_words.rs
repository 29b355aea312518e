//! The words that a shell offers: verbs, options, values, images and containers.

use clap::{Arg, ArgAction, Command, ValueHint};

/// The kind of thing that an argument names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NameKind {
    Image,
    Container,
}

use NameKind::{Container, Image};

/// Arguments that are names of images or containers: the verbs, the argument, and the kind of its names.
const NAMES: &[(&[&str], &str, &[NameKind])] = &[
    (&["run", "bundle", "trace"], "image", &[Image]),
    (&["show", "tag", "push", "convert", "index", "filter", "mount"], "name", &[Image]),
    (&["rmi", "verify", "du"], "names", &[Image]),
    (&["merge"], "images", &[Image]),
    (&["ls", "tree", "dump"], "target", &[Image]),
    (&["cat"], "targets", &[Image]),
    (&["diff"], "old", &[Image, Container]),
    (&["diff"], "new", &[Image]),
    (&["export"], "name", &[Image, Container]),
    (&["exec", "logs", "commit"], "container", &[Container]),
    (&["stop", "wait"], "containers", &[Container]),
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

/// Returns what to offer for the last of the words, which follow the name of the program. All words may be empty.
pub(crate) fn offer(program: &Command, words: &[String]) -> Offer {
    let Some((last, before)) = words.split_last() else { return Offer::NOTHING };
    let mut command = program;
    let mut place = 0;
    let mut awaited = None;
    let mut has_options = true;
    for word in before {
        if awaited.take().is_some() {
            continue;
        }
        if has_options && word == "--" {
            has_options = false;
        } else if has_options && word.starts_with('-') && word.len() > 1 {
            awaited = awaiting(command, word);
        } else if command.has_subcommands() {
            match command.find_subcommand(word) {
                Some(verb) => command = verb,
                None => return Offer::NOTHING,
            }
        } else {
            place += 1;
            // The rest belongs to the program in the container.
            has_options = has_options && !positional(command, place).is_some_and(ends_options);
        }
    }
    if let Some(option) = awaited {
        return values(command, option, "");
    }
    if has_options
        && let Some((name, _)) = last.split_once('=')
        && let Some(option) = find(command, name)
    {
        return values(command, option, &format!("{name}="));
    }
    if has_options && last.starts_with('-') {
        return Offer::Words(options(command));
    }
    if command.has_subcommands() {
        return Offer::Words(verbs(command));
    }
    match positional(command, place) {
        Some(argument) => values(command, argument, ""),
        None => Offer::NOTHING,
    }
}

/// Returns the positional argument at this place.
fn positional(command: &Command, place: usize) -> Option<&Arg> {
    let takes_many = |it: &&&Arg| it.get_num_args().is_some_and(|it| it.max_values() > 1);
    let all: Vec<_> = command.get_positionals().filter(|it| !it.is_hide_set()).collect();
    all.get(place).or_else(|| all.iter().rfind(takes_many)).copied()
}

/// Returns whether this argument is a program's command line.
fn ends_options(argument: &Arg) -> bool {
    argument.is_trailing_var_arg_set()
}

/// Returns the option of this name, with its hyphens.
fn find<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|it| match name.strip_prefix("--") {
        Some(long) => {
            it.get_long() == Some(long) || it.get_all_aliases().is_some_and(|it| it.contains(&long))
        }
        None => {
            let mut short = name.strip_prefix('-').unwrap_or_default().chars();
            it.get_short().is_some() && it.get_short() == short.next() && short.next().is_none()
        }
    })
}

fn takes_value(option: &Arg) -> bool {
    matches!(option.get_action(), ArgAction::Set | ArgAction::Append)
}

/// Returns the option whose value is the next word.
fn awaiting<'a>(command: &'a Command, word: &str) -> Option<&'a Arg> {
    if word.starts_with("--") {
        let option = find(command, word)?;
        return (takes_value(option) && !option.is_require_equals_set()).then_some(option);
    }
    // `-it`: the first that takes a value takes the rest of the word.
    let mut letters = word.chars().skip(1);
    let option = letters
        .find_map(|letter| find(command, &format!("-{letter}")).filter(|it| takes_value(it)))?;
    letters.next().is_none().then_some(option)
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
        offer(&built(), &line.split(' ').map(str::to_owned).collect::<Vec<_>>())
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
        ] {
            assert_eq!(words(line), Offer::Names(expect), "{line}");
        }
        for line in ["run a ", "run a -", "run --name ", "run -e ", "exec a sh -", "tag a ", "x y "]
        {
            assert_eq!(words(line), Offer::NOTHING, "{line}");
        }
        for line in ["run --env-file ", "run --env-file=", "run -v "] {
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
            let Offer::Words(all) = offer(&command, &[verb.get_name().to_owned(), "-".to_owned()])
            else {
                continue;
            };
            for hidden in verb.get_arguments().filter(|it| it.is_hide_set()) {
                count += 1;
                let long = format!("--{}", hidden.get_long().unwrap_or_default());
                assert!(all.iter().all(|it| it.word != long), "{}: {long}", verb.get_name());
            }
        }
        assert!(count > 0);
    }
}
