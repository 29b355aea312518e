//! `completions`: prints a completion script for a shell. The script calls the verb again for the words to offer.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::Path;

use clap::Args;
use clap_complete::Shell;
use container::life::lookup;
use store::{OpenOptions, Store};

use super::completion_words::{NameKind, Offer, OfferedWord, offer};
use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::verbs::VerbArgs;

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
const OF_RUNNING: [&str; 3] = ["exec", "stop", "wait"];

fn completions(context: &Context, args: &Completions) -> anyhow::Result<Answer> {
    let mut text = Vec::new();
    if args.words.is_empty() {
        match script(args.shell) {
            Some(script) => text.extend_from_slice(script.as_bytes()),
            // Collected in memory, because clap needs a writer that cannot fail.
            None => {
                let mut command = crate::verbs::command();
                clap_complete::generate(args.shell, &mut command, "quire", &mut text);
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

/// Returns the lines for a script: words that begin with the last word, or what the shell itself is to offer.
fn answer(context: &Context, args: &Completions) -> Vec<String> {
    let words: Vec<_> = args.words.iter().map(|it| it.to_string_lossy().into_owned()).collect();
    let mut command = crate::verbs::command();
    command.build();
    let offered = match offer(&command, &words) {
        Offer::Words(words) => words,
        Offer::Names(kinds) => names(context, kinds, &words),
        Offer::Files => return vec![":files".to_owned()],
        Offer::Directories => return vec![":directories".to_owned()],
        Offer::Programs => return vec![":programs".to_owned()],
    };
    let begun = words.last().map_or("", String::as_str);
    let fitting = offered.iter().filter(|it| it.word.starts_with(begun));
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
fn names(context: &Context, kinds: &[NameKind], words: &[String]) -> Vec<OfferedWord> {
    let own = match named_store(words) {
        Some(directory) => context.open_at(Path::new(directory)).ok(),
        None => context.open(OpenOptions::read()).ok(),
    };
    let begun = words.last().map_or("", String::as_str);
    let mut found = Vec::new();
    if kinds.contains(&NameKind::Image) {
        for store in own.iter().map(Ok).chain(context.open_shared().map(Err)) {
            let store: &Store = match &store {
                Ok(own) => own,
                Err(shared) => shared,
            };
            let Ok((names, _)) = store.refs.readable() else { continue };
            found.extend(names.keys().map(|it| shown(it.as_str(), begun).to_owned()));
        }
    }
    if kinds.contains(&NameKind::Container) {
        let needs_running = words.iter().any(|it| OF_RUNNING.contains(&it.as_str()));
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

/// Returns the value of `--store` among the words.
fn named_store(words: &[String]) -> Option<&str> {
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match word.strip_prefix("--store") {
            Some("") => return words.next().map(String::as_str),
            Some(value) if value.starts_with('=') => return value.get(1..),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_dockers_registry_are_short() {
        let check = |name, begun, expect| assert_eq!(shown(name, begun), expect, "{name} {begun}");
        check("docker.io/library/alpine:latest", "", "alpine:latest");
        check("docker.io/library/alpine:latest", "docker", "docker.io/library/alpine:latest");
        check("docker.io/a/b:1", "a/", "a/b:1");
        check("library/a", "", "library/a");
        check("ghcr.io/a/b:1", "", "ghcr.io/a/b:1");
    }

    #[test]
    fn words_may_name_the_store() {
        let check = |line: &str, expect| {
            let words: Vec<_> = line.split(' ').map(str::to_owned).collect();
            assert_eq!(named_store(&words), expect, "{line}");
        };
        check("run ", None);
        check("--store /a run ", Some("/a"));
        check("run --store=/b ", Some("/b"));
    }
}
