//! Commands in groups, as docker and podman have them: `image ls` is `images`.
//!
//! The two words are replaced before clap reads the command line, so that help, errors and completions are those of the
//! command itself.

use std::ffi::OsString;

use clap::Args;

use crate::Answer;
use crate::session::context::Context;
use crate::session::failure::UsageError;
use crate::verbs::VerbArgs;
use crate::verbs::command_words::CommandWords;
use crate::verbs::exit_codes::ExitCodes;

/// A group, its commands that have another name without it, and those that have the same name.
struct Group {
    name: &'static str,
    renamed: &'static [(&'static str, &'static [&'static str])],
    same: &'static [&'static str],
}

static GROUPS: [Group; 3] = [
    Group {
        name: "image",
        renamed: &[
            ("ls", &["images"]),
            ("list", &["images"]),
            ("rm", &["rmi"]),
            ("inspect", &["inspect", "--type", "image"]),
            ("exists", &["inspect", "--type", "image", "--exists"]),
            ("prune", &["system", "prune", "--only", "images"]),
            ("unmount", &["umount"]),
        ],
        same: &[
            "build", "diff", "history", "import", "load", "mount", "pull", "push", "save", "show",
            "sign", "tag", "tree", "umount", "untag",
        ],
    },
    Group {
        name: "container",
        renamed: &[
            ("ls", &["ps"]),
            ("list", &["ps"]),
            ("inspect", &["inspect", "--type", "container"]),
            ("exists", &["inspect", "--type", "container", "--exists"]),
            ("prune", &["system", "prune", "--only", "containers"]),
        ],
        same: &[
            "attach", "commit", "cp", "create", "diff", "exec", "export", "kill", "logs", "port",
            "ps", "restart", "rm", "run", "start", "stop", "wait",
        ],
    },
    // Its own actions, `df` and `prune`, are those of the command `system`.
    Group { name: "system", renamed: &[], same: &["info", "version"] },
];

/// Replaces the words of a group by those of the command. Returns `None` if the line has no group. `words` is the whole
/// command line.
pub(crate) fn without_group(words: &[OsString]) -> Option<Vec<OsString>> {
    let is_group = |it: &OsString| GROUPS.iter().any(|group| it == group.name);
    // Most command lines have none of these words, and building all commands takes time.
    if !words.iter().skip(1).any(is_group) {
        return None;
    }
    let mut program = crate::verbs::command();
    program.build();
    let texts: Vec<_> = words.iter().skip(1).map(|it| it.to_string_lossy()).collect();
    let (verb, at) = CommandWords::read(&program, &texts).verb?;
    // The commands below `help` are not called.
    let at = if verb == "help" { at + 1 } else { at };
    let group = GROUPS.iter().find(|group| texts.get(at).is_some_and(|it| *it == group.name))?;
    let word = texts.get(at + 1)?;
    let renamed = group.renamed.iter().find(|it| word == it.0).map(|it| it.1);
    let same = group.same.iter().position(|it| word == it).map(|at| &group.same[at..=at]);
    let mut new = renamed.or(same)?;
    if verb == "help" {
        // Help explains the command, without options.
        new = new.get(..1).unwrap_or_default();
    }
    // `texts` lacks the name of the program.
    let (before, after) = (words.get(..=at)?, words.get(at + 3..).unwrap_or_default());
    let new = new.iter().map(|it| OsString::from(*it));
    Some(before.iter().cloned().chain(new).chain(after.iter().cloned()).collect())
}

/// Returns the commands of a group.
pub(crate) fn commands(name: &str) -> Vec<&'static str> {
    let group = GROUPS.iter().find(|it| it.name == name);
    let mut all: Vec<_> = group
        .into_iter()
        .flat_map(|it| it.renamed.iter().map(|it| it.0).chain(it.same.iter().copied()))
        .collect();
    all.sort_unstable();
    all
}

/// Returns the error of a command that a group does not have.
fn unknown(name: &str, word: Option<&OsString>) -> anyhow::Error {
    let all = commands(name).join(", ");
    let text = match word {
        Some(word) => format!(
            "there is no command `{name} {}`: the commands of {name} are {all}",
            word.to_string_lossy().escape_debug()
        ),
        None => format!("name a command: those of {name} are {all}"),
    };
    UsageError(text).into()
}

#[derive(Debug, Args)]
pub(crate) struct ImageGroup {
    /// A command, and its arguments
    #[arg(value_name = "COMMAND", trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) words: Vec<OsString>,
}

impl VerbArgs for ImageGroup {
    const NAME: &'static str = "image";
    const ABOUT: &'static str = "Manage images with the commands of docker and podman";
    const DETAILS: &'static str = "Each of these commands is another name of a command without the group: `ls` of \
        `images`, `rm` of `rmi`, `inspect` of `inspect --type image`, and `prune` of `system prune` for images only. \
        `exists` exits with 1 if there is no such image. The others have the same name: build, diff, history, import, \
        load, mount, pull, push, save, show, sign, tag, tree, umount and untag.";
    const EXAMPLES: &'static str = "quire image ls\n  quire image rm --force app:old";
    const PRINTS_JSON: bool = false;

    fn call(&self, _context: &Context) -> anyhow::Result<Answer> {
        Err(unknown(Self::NAME, self.words.first()))
    }
}

#[derive(Debug, Args)]
pub(crate) struct ContainerGroup {
    /// A command, and its arguments
    #[arg(value_name = "COMMAND", trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) words: Vec<OsString>,
}

impl VerbArgs for ContainerGroup {
    const NAME: &'static str = "container";
    const ABOUT: &'static str = "Manage containers with the commands of docker and podman";
    const DETAILS: &'static str = "Each of these commands is another name of a command without the group: `ls` of `ps`, \
        `inspect` of `inspect --type container`, and `prune` of `system prune` for containers only. `exists` exits with \
        1 if there is no such container. The others have the same name: attach, commit, cp, create, diff, exec, export, \
        kill, logs, port, ps, restart, rm, run, start, stop and wait.";
    const EXAMPLES: &'static str = "quire container ls --all\n  quire container prune --force";
    const PRINTS_JSON: bool = false;
    const EXIT_CODES: ExitCodes = ExitCodes::Groups;

    fn call(&self, _context: &Context) -> anyhow::Result<Answer> {
        Err(unknown(Self::NAME, self.words.first()))
    }
}

#[cfg(all(test, feature = "serve"))]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn groups_are_replaced() {
        let check = |line: &str, expect: Option<&str>| {
            assert_eq!(without_group(&words(line)), expect.map(words), "{line}");
        };
        check("quire image ls -q", Some("quire images -q"));
        check("quire --store /x image rm a", Some("quire --store /x rmi a"));
        check("quire container ls --all", Some("quire ps --all"));
        check("quire container exec -it web sh", Some("quire exec -it web sh"));
        check("quire image inspect a", Some("quire inspect --type image a"));
        check("quire container exists a", Some("quire inspect --type container --exists a"));
        check("quire container prune -f", Some("quire system prune --only containers -f"));
        check("quire system info --format json", Some("quire info --format json"));
        check("quire help image ls", Some("quire help images"));
        check("quire help container prune", Some("quire help system"));
        // These words belong to other commands, or are no commands of the group.
        for line in [
            "quire run debian image ls",
            "quire tag image ls",
            "quire images",
            "quire system df",
            "quire image",
            "quire image nosuch",
            "quire --store image ps",
            "quire help image",
        ] {
            check(line, None);
        }
    }

    /// The commands that groups lead to exist, and the help names all of them.
    #[test]
    fn commands_of_groups_exist() {
        let program = crate::verbs::command();
        for group in &GROUPS {
            let renamed = group.renamed.iter().filter_map(|it| it.1.first());
            for command in renamed.chain(group.same) {
                assert!(program.find_subcommand(command).is_some(), "{} {command}", group.name);
            }
        }
        for (name, details) in [
            (ImageGroup::NAME, ImageGroup::DETAILS),
            (ContainerGroup::NAME, ContainerGroup::DETAILS),
        ] {
            for command in commands(name) {
                let is_alias = ["list", "unmount"].contains(&command);
                assert!(is_alias || details.contains(command), "{name} {command}");
            }
        }
    }
}
