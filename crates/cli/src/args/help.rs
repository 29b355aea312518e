//! Help and man pages besides the options: verbs in groups, examples, exit codes.

use clap::Command;

/// Verbs by what they are about, in the order of `quire --help`. One that is not built in is left out.
const GROUPS: [(&str, &[&str]); 4] = [
    (
        "Images",
        &[
            "import",
            "pull",
            "images",
            "show",
            "ls",
            "tree",
            "cat",
            "diff",
            "dump",
            "mount",
            "umount",
            "export",
            "push",
            "tag",
            "rmi",
            "convert",
            "index",
            "merge",
            "filter",
            "referrers",
            "login",
            "logout",
        ],
    ),
    (
        "Containers",
        &["run", "ps", "logs", "exec", "stop", "wait", "rm", "commit", "snapshot", "bundle"],
    ),
    ("Store", &["du", "verify", "fsck", "gc", "share", "unseal"]),
    ("Tools", &["build", "serve", "trace", "doctor", "completions", "man", "help"]),
];

const CODES: &str =
    "Exit codes: 0 done, or yes; 1 the answer is no (damage, a difference); 2 could not do it";

const RUN_CODES: &str = "\
Exit codes: the program's own; 128+N when signal N ended it; 125 Quire or the runtime failed; \
126 the program cannot be executed; 127 the program, or a file it needs to start, is not there; \
255 the time of --timeout was over

Signals: quire passes signals on to the program. The program is PID 1 in its container, so the kernel drops INT and TERM \
unless the program handles them. TERM therefore kills a program of `run` that neither handles, ignores nor blocks \
it (exit code 143). The third signal that quire receives kills the container.

On a terminal, Ctrl-C goes to the program. Two within two seconds kill a program that is PID 1 and neither handles nor \
ignores the signal. Ctrl-P Ctrl-Q leaves a container of `run`: it goes on, and its output goes to its log.";

/// Commands that can be tried, by verb.
pub(super) const EXAMPLES: [(&str, &str); 44] = [
    (
        "import",
        "quire import oci:./layout:1.0 app\n  docker export web | quire import tar:- web\n  quire import dir:/srv/root base",
    ),
    ("pull", "quire pull debian:13\n  quire pull --platform linux/arm64 ghcr.io/owner/app:1.2 app"),
    (
        "export",
        "quire export app oci:./layout\n  quire export app erofs:app.erofs\n  quire export app tar:- | tar t",
    ),
    ("push", "quire push app registry.example.com/team/app:1.2"),
    ("referrers", "quire referrers ghcr.io/owner/app:1.2"),
    (
        "login",
        "quire login registry.example.com\n  quire login -u robot --password-stdin registry.example.com < token",
    ),
    ("logout", "quire logout registry.example.com"),
    ("convert", "quire convert --form packed debian"),
    ("index", "quire index debian\n  quire index --json debian"),
    (
        "build",
        "quire build dir:/srv/root root.erofs\n  quire build --digest-store objects dir:/srv/root root.erofs",
    ),
    ("mount", "quire mount debian /mnt\n  quire mount --writable memory --replace debian /mnt"),
    ("umount", "quire umount /mnt"),
    (
        "run",
        "quire run debian -- cat /etc/os-release\n  quire run -d --name web -v /srv/www:/www:ro nginx\n  \
         quire run --read-only --memory 512m --userns auto app",
    ),
    ("bundle", "quire bundle debian ./bundle\n  runc run --bundle ./bundle one"),
    ("ps", "quire ps\n  quire ps --all --size"),
    ("logs", "quire logs --tail 20 web\n  quire logs --follow web"),
    ("exec", "quire exec web -- ps ax\n  quire exec -it web sh"),
    ("stop", "quire stop web\n  quire stop --time 30 web db"),
    ("wait", "quire wait web"),
    ("images", "quire images\n  quire images --digests"),
    ("show", "quire show debian\n  quire show --json debian"),
    ("ls", "quire ls -l debian:/etc\n  quire ls -R ./root.erofs"),
    ("tree", "quire tree -L 2 debian"),
    ("cat", "quire cat debian:/etc/os-release"),
    ("dump", "quire dump debian"),
    ("diff", "quire diff debian:12 debian:13\n  quire diff web"),
    ("commit", "quire commit -m 'configured' --change 'CMD [\"app\"]' web app:2"),
    ("merge", "quire merge runtime application whole"),
    ("filter", "quire filter --exclude usr/share/doc --exclude '*.pyc' debian slim"),
    ("snapshot", "quire snapshot web changes.tar"),
    ("du", "quire du\n  quire du --memory"),
    ("tag", "quire tag app app:stable"),
    ("rm", "quire rm web\n  quire rm --force web db"),
    ("rmi", "quire rmi app:old"),
    ("verify", "quire verify debian"),
    ("fsck", "quire fsck\n  quire fsck --repair"),
    ("gc", "quire gc --dry-run\n  quire gc\n  quire gc --older-than 7d --keep-storage 20g"),
    ("share", "quire share\n  quire share --undo"),
    ("unseal", "quire unseal --store ./store"),
    (
        "serve",
        "quire serve --lazy\n  quire serve --lazy --replace\n  quire serve --snapshotter\n  \
         quire serve --snapshotter --print-config containerd --version 2.4",
    ),
    (
        "trace",
        "quire trace debian -- cat /etc/os-release\n  quire trace --as worker app -- app worker --once",
    ),
    ("doctor", "quire doctor\n  quire doctor --json"),
    ("completions", "quire completions bash > /etc/bash_completion.d/quire"),
    ("man", "quire man /usr/local/share/man/man1"),
];

/// What stands below the options of a verb.
pub(super) fn after(verb: &str) -> String {
    let codes = if ["run", "exec", "trace"].contains(&verb) { RUN_CODES } else { CODES };
    match EXAMPLES.iter().find(|(name, _)| *name == verb) {
        Some((_, examples)) => format!("Examples:\n  {examples}\n\n{codes}"),
        None => codes.to_owned(),
    }
}

/// The help of the whole program, with its verbs in groups.
pub(super) fn template(command: &Command) -> String {
    let mut text = "{before-help}{about-with-newline}\n{usage-heading} {usage}\n".to_owned();
    for (group, verbs) in GROUPS {
        text += &format!("\n{group}:\n");
        for name in verbs {
            let about = match command.find_subcommand(name) {
                Some(verb) => told(verb),
                None if *name == "help" => "Show the help of a verb".to_owned(),
                None => continue,
            };
            text += &format!("  {name:<12} {about}\n");
        }
    }
    text + "\nOptions:\n{options}{after-help}"
}

/// A verb in a line.
fn told(verb: &Command) -> String {
    let about = verb.get_about().map(ToString::to_string).unwrap_or_default();
    let aliases: Vec<_> = verb.get_visible_aliases().collect();
    if aliases.is_empty() { about } else { format!("{about} [alias: {}]", aliases.join(", ")) }
}

/// What stands below the help of the whole program.
pub(super) const CODES_OF_ALL: &str = CODES;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_verb_is_in_one_group_and_has_an_example() {
        let command = super::super::command();
        for verb in command.get_subcommands() {
            let name = verb.get_name();
            let groups = GROUPS.iter().filter(|(_, verbs)| verbs.contains(&name));
            assert_eq!(groups.count(), 1, "{name}");
            assert_eq!(EXAMPLES.iter().filter(|it| it.0 == name).count(), 1, "{name}");
            assert!(told(verb).len() <= 84, "{name}: its line is too long");
        }
    }
}
