//! The unit of `start --print-unit`, by which systemd starts containers at boot.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;

/// Name of the unit in the sentences for the user.
const NAME: &str = "quire-restart.service";

/// A unit that starts containers at boot.
#[derive(Debug)]
struct BootUnit {
    /// Path of this program.
    program: PathBuf,
    /// The store of the containers.
    store: PathBuf,
    /// Whether the command line names the store.
    is_named: bool,
    /// Whether it is a unit of a user, and not of the system.
    is_of_user: bool,
}

/// Prints the unit for this user and store.
pub(super) fn print(context: &Context) -> anyhow::Result<Answer> {
    let program = std::env::current_exe().context("cannot determine the path of this program")?;
    let is_of_user = !context.outside().is_host_root();
    let store = std::path::absolute(context.store_directory()?)?;
    let is_named = context.names_store();
    let unit = BootUnit { program, store, is_named, is_of_user };
    report::line(unit.text()?.trim_end())?;
    context.remark(&match is_of_user {
        true => format!(
            "write this to ~/.config/systemd/user/{NAME}; then `systemctl --user enable {NAME}` and `loginctl \
            enable-linger` start the containers at boot"
        ),
        false => format!(
            "write this to /etc/systemd/system/{NAME}; then `systemctl enable {NAME}` starts the containers at boot"
        ),
    });
    Ok(Answer::Yes)
}

impl BootUnit {
    fn text(&self) -> anyhow::Result<String> {
        let (program, store) = (word(&self.program, "$")?, word(&self.store, "$")?);
        let named = match self.is_named {
            true => format!(" --store {}", word(&self.store, "$$")?),
            false => String::new(),
        };
        let (needs, target) = match self.is_of_user {
            // A unit of a user cannot depend on units of the system.
            true => (String::new(), "default.target"),
            false => (
                format!(
                    "Wants=network-online.target\nAfter=network-online.target local-fs.target\nRequiresMountsFor={store}\n"
                ),
                "multi-user.target",
            ),
        };
        Ok(format!(
            "# Starts the containers whose restart policy is always, or unless-stopped if no user has stopped them.\n\
            # `quire start --print-unit` has printed this file.\n\n\
            [Unit]\n\
            Description=Quire: containers that start at boot\n\
            Documentation=man:quire-start(1)\n\
            {needs}\n\
            [Service]\n\
            Type=oneshot\n\
            RemainAfterExit=yes\n\
            ExecStart={program}{named} start --at-boot\n\
            # The monitors of these containers stay in this unit. When it stops, they pass the signal on to the programs,\n\
            # and start none again. No user has stopped the containers then, so the next boot starts them.\n\
            KillMode=control-group\n\
            TimeoutStopSec=30\n\
            # Containers with limits have cgroups below that of the unit, if the user is not root.\n\
            Delegate=yes\n\n\
            [Install]\n\
            WantedBy={target}\n"
        ))
    }
}

/// Returns a path as a word of a unit. `dollar` stands for a `$`, which begins a variable only in the arguments of a
/// program. Source: systemd.service(5), "Command lines"; systemd.unit(5), "Specifiers".
fn word(path: &Path, dollar: &str) -> anyhow::Result<String> {
    let text = path.to_str().filter(|it| !it.contains(['\n', '\r']));
    let text = text.with_context(|| format!("a unit cannot have the path {path:?}"))?;
    let is_plain = |it: char| it.is_ascii_alphanumeric() || "/._-+@:".contains(it);
    if text.chars().all(is_plain) {
        return Ok(text.to_owned());
    }
    let mut word = String::from("\"");
    for it in text.chars() {
        match it {
            '"' | '\\' => word.extend(['\\', it]),
            // A single one would begin a specifier.
            '%' => word.push_str("%%"),
            '$' => word.push_str(dollar),
            _ => word.push(it),
        }
    }
    word.push('"');
    Ok(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted() {
        for (path, expect) in [
            ("/usr/bin/quire", "/usr/bin/quire"),
            ("/srv/a b", r#""/srv/a b""#),
            (r#"/a"b\c"#, r#""/a\"b\\c""#),
            ("/100%/$HOME", r#""/100%%/$$HOME""#),
        ] {
            assert_eq!(word(Path::new(path), "$$").unwrap(), expect);
        }
        assert!(word(Path::new("/a\nExecStart=/bin/sh"), "$$").is_err());
    }

    /// Only in the arguments of a program does a `$` begin a variable.
    #[test]
    fn dollars_are_doubled_only_in_arguments() {
        let unit = BootUnit {
            program: "/$a/quire".into(),
            store: "/srv/$b".into(),
            is_named: true,
            is_of_user: false,
        };
        let text = unit.text().unwrap();
        for line in [
            r#"ExecStart="/$a/quire" --store "/srv/$$b" start --at-boot"#,
            r#"RequiresMountsFor="/srv/$b""#,
        ] {
            assert!(text.lines().any(|it| it == line), "{line}: {text}");
        }
    }

    #[test]
    fn units_of_the_system_and_of_users_differ() {
        let unit = |is_of_user, is_named| BootUnit {
            program: "/usr/bin/quire".into(),
            store: "/var/lib/quire".into(),
            is_named,
            is_of_user,
        };
        let system = unit(false, false).text().unwrap();
        for line in [
            "ExecStart=/usr/bin/quire start --at-boot",
            "RequiresMountsFor=/var/lib/quire",
            "WantedBy=multi-user.target",
        ] {
            assert!(system.lines().any(|it| it == line), "{line}: {system}");
        }
        let user = unit(true, true).text().unwrap();
        let start = "ExecStart=/usr/bin/quire --store /var/lib/quire start --at-boot";
        for line in [start, "WantedBy=default.target"] {
            assert!(user.lines().any(|it| it == line), "{line}: {user}");
        }
        assert!(!user.contains("network-online.target"), "{user}");
    }
}
