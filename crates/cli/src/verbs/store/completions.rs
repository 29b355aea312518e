//! `completions`: prints a completion script for a shell. The script calls the verb again for the words to offer.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::Path;

use clap::builder::Resettable;
use clap::{Arg, Args, Command, Id};
use clap_complete::Shell;
use container::life::lookup;
use store::{OpenOptions, Store};

use super::completion_words::{NameKind, Offer, OfferedWord, offer};
use crate::Answer;
use crate::output::report;
use crate::output::version::VERSION;
use crate::session::context::Context;
use crate::verbs::command_words::CommandWords;
use crate::verbs::groups::without_group;
use crate::verbs::{VERBS, VerbArgs};

#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: Shell,
    /// Words of a command line up to the cursor, for which a script asks
    #[arg(last = true, hide = true)]
    pub(crate) words: Vec<OsString>,
}

impl VerbArgs for Completions {
    const NAME: &'static str = "completions";
    const ABOUT: &'static str = "Print a completion script for a shell";
    const EXAMPLES: &'static str = "quire completions bash > /etc/bash_completion.d/quire";
    const PRINTS_JSON: bool = false;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        completions(context, self)
    }
}

/// Verbs that need a running container.
const OF_RUNNING: [&str; 6] = ["attach", "exec", "kill", "port", "stop", "wait"];

fn completions(context: &Context, args: &Completions) -> anyhow::Result<Answer> {
    let mut text = Vec::new();
    if args.words.is_empty() {
        match script(args.shell) {
            Some(script) => text.extend_from_slice(script.as_bytes()),
            // Collected in memory, because clap needs a writer that cannot fail.
            None => {
                clap_complete::generate(args.shell, &mut without_hidden(), "quire", &mut text);
            }
        }
    } else {
        for line in answer(context, args) {
            text.extend_from_slice(line.as_bytes());
            text.push(b'\n');
        }
    }
    let mut out = report::standard_output();
    out.write_all(&text)?;
    out.flush()?;
    Ok(Answer::Yes)
}

/// Returns a script that asks Quire, if there is one for this shell.
const fn script(shell: Shell) -> Option<&'static str> {
    match shell {
        Shell::Bash => Some(include_str!("completion_scripts/quire.bash")),
        Shell::Fish => Some(include_str!("completion_scripts/quire.fish")),
        Shell::Zsh => Some(include_str!("completion_scripts/_quire")),
        _ => None,
    }
}

/// Returns a command line without hidden options, because clap's scripts would offer them.
fn without_hidden() -> Command {
    let mut all = crate::verbs::command().version(VERSION);
    all.build();
    // A script does not need the relations to other options, which may be hidden.
    let free = |arg: &Arg| {
        let arg = arg.clone().conflicts_with(Resettable::<Id>::Reset);
        arg.requires(Resettable::<Id>::Reset).overrides_with(Resettable::<Id>::Reset)
    };
    let copy = |name: &'static str, from: &Command| {
        let about = from.get_about().cloned().unwrap_or_default();
        let shown = from.get_arguments().filter(|it| !it.is_hide_set() && !it.is_positional());
        let copy = Command::new(name).about(about).version(VERSION).args(shown.map(free));
        copy.disable_help_flag(true).disable_version_flag(true)
    };
    let verbs = VERBS.iter().filter_map(|row| {
        let verb = copy(row.name, all.find_subcommand(row.name)?);
        Some(row.alias.into_iter().fold(verb, Command::visible_alias))
    });
    copy("quire", &all).subcommands(verbs)
}

/// Returns the lines for a script: words that begin with the last word, or what the shell itself is to offer.
fn answer(context: &Context, args: &Completions) -> Vec<String> {
    let words: Vec<_> = args.words.iter().map(|it| it.to_string_lossy()).collect();
    let Some((begun, before)) = words.split_last() else { return Vec::new() };
    let mut command = crate::verbs::command();
    command.build();
    let program = std::iter::once(OsString::from("quire"));
    let before: Vec<_> = program.chain(before.iter().map(|it| OsString::from(&**it))).collect();
    // Such as `container exec`.
    let before = without_group(&before).unwrap_or(before);
    let before: Vec<_> = before.iter().skip(1).map(|it| it.to_string_lossy()).collect();
    let before = CommandWords::read(&command, &before);
    let offered = match offer(&before, begun) {
        Offer::Words(words) => words,
        Offer::Names(kinds) => names(context, kinds, &before, begun),
        Offer::Files => return vec![":files".to_owned()],
        Offer::Directories => return vec![":directories".to_owned()],
        Offer::Programs => return vec![":programs".to_owned()],
    };
    let fitting = offered.iter().filter(|it| it.word.starts_with(&**begun));
    fitting.map(|it| line(args.shell, it)).collect()
}

/// Writes a word in the form that the script of the shell expects.
fn line(shell: Shell, offered: &OfferedWord) -> String {
    let OfferedWord { word, about } = offered;
    match shell {
        Shell::Zsh if about.is_empty() => word.replace(':', "\\:"),
        Shell::Zsh => format!("{}:{about}", word.replace(':', "\\:")),
        Shell::Fish if !about.is_empty() => format!("{word}\t{about}"),
        _ => word.clone(),
    }
}

/// Returns the names in the stores. A store that cannot be read has none: the verb itself will report the reason.
fn names(
    context: &Context,
    kinds: &[NameKind],
    before: &CommandWords<'_>,
    begun: &str,
) -> Vec<OfferedWord> {
    let own = match before.value("store") {
        Some(directory) => context.open_at(Path::new(directory)).ok(),
        None => context.open(OpenOptions::read()).ok(),
    };
    let mut found = Vec::new();
    if kinds.contains(&NameKind::Image) {
        for store in own.iter().map(Ok).chain(context.open_shared().map(Err)) {
            let store: &Store = match &store {
                Ok(own) => own,
                Err(shared) => shared,
            };
            let Ok((names, _)) = store.refs.readable() else { continue };
            let names = names.keys().filter(|it| !it.is_unnamed());
            found.extend(names.map(|it| shown(it.as_str(), begun).to_owned()));
        }
    }
    if kinds.contains(&NameKind::Container) {
        let needs_running = OF_RUNNING.contains(&before.command.get_name());
        let all = own.as_ref().and_then(|store| lookup::all(store).ok()).unwrap_or_default();
        let fitting = all.iter().filter(|it| !needs_running || it.is_running());
        found.extend(fitting.map(|it| it.id.clone()));
    }
    found.sort_unstable();
    found.dedup();
    found.into_iter().map(|word| OfferedWord { word, about: String::new() }).collect()
}

/// Returns the form of an image's name to offer: the short one of Docker's own registry, unless the long one is
/// being typed.
fn shown<'a>(name: &'a str, begun: &str) -> &'a str {
    let short = name.strip_prefix("docker.io/").unwrap_or(name);
    let short = short.strip_prefix("library/").filter(|_| short != name).unwrap_or(short);
    if short.starts_with(begun) { short } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// elvish and PowerShell get clap's scripts.
    #[test]
    fn scripts_of_clap_have_no_hidden_options() {
        let mut all = crate::verbs::command();
        all.build();
        let shown = without_hidden();
        let mut hidden = 0;
        for verb in all.get_subcommands().filter(|it| it.get_name() != "help") {
            let copy = shown.find_subcommand(verb.get_name()).expect("each verb");
            let longs: Vec<_> = copy.get_arguments().filter_map(Arg::get_long).collect();
            for arg in verb.get_arguments().filter(|it| !it.is_positional()) {
                let Some(long) = arg.get_long() else { continue };
                assert_eq!(
                    longs.contains(&long),
                    !arg.is_hide_set(),
                    "{}: {long}",
                    verb.get_name()
                );
                hidden += usize::from(arg.is_hide_set());
            }
        }
        assert!(hidden > 0);
    }

    #[test]
    fn names_of_dockers_registry_are_short() {
        let check = |name, begun, expect| assert_eq!(shown(name, begun), expect, "{name} {begun}");
        check("docker.io/library/alpine:latest", "", "alpine:latest");
        check("docker.io/library/alpine:latest", "docker", "docker.io/library/alpine:latest");
        check("docker.io/a/b:1", "a/", "a/b:1");
        check("library/a", "", "library/a");
        check("ghcr.io/a/b:1", "", "ghcr.io/a/b:1");
    }
}
