//! `cargo xtask session`: runs the sessions of README.md and of docs/getting-started.md as an ordinary user, and writes
//! their output into these pages. Draws the second one as docs/session.svg.
//!
//! The images come from a registry on loopback, which is a mirror of Docker Hub for these sessions.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use regex_lite::Regex;
use testing::daemon::{Daemon, PROGRAM};

use rig::cache::Cache;
use rig::process::{is_root, need, quiet, repository};
use rig::{Failed, Skipped, inputs, tools};

use crate::install;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Compare the output with the pages, and change no file
    #[arg(long)]
    check: bool,
    /// Run this binary instead of building one
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// The image for the sessions, as `quire import` takes it; by default a small Debian from the cache
    #[arg(long, value_name = "SOURCE")]
    source: Option<String>,
}

/// The pages. Each has its session in the first block of the language `console`.
const PAGES: [&str; 2] = ["README.md", DRAWN];

/// The page whose session is drawn.
const DRAWN: &str = "docs/getting-started.md";

/// The picture of a session.
const PICTURE: &str = "docs/session.svg";

/// Number of the ordinary user, and of its group.
const USER: u32 = 1000;

/// The names under which the sessions pull the image.
const NAMES: [&str; 2] = ["library/debian:latest", "library/debian:stable-slim"];

/// The user's name and ranges of ids, in a mount namespace of the session.
const SANDBOX: &str = r#"
set -eu
mount --bind "$1/passwd" /etc/passwd
for file in subuid subgid; do
    [ -e /etc/$file ] || : > /etc/$file
    mount --bind "$1/$file" /etc/$file
done
exec setpriv --reuid=1000 --regid=1000 --clear-groups env -i HOME="$1/home" USER=alice PATH="$1/bin:/usr/bin:/bin" \
    LANG=C.UTF-8 COLUMNS=100 sh "$1/session"
"#;

pub(crate) fn run(args: &Args) -> Result<()> {
    if !is_root() {
        bail!(Skipped(String::from(
            "the sessions run as an ordinary user that this task makes, which needs root"
        )));
    }
    for program in ["unshare", "setpriv", "newuidmap"] {
        need(program)?;
    }
    let source = match &args.source {
        Some(source) => source.clone(),
        None => {
            tools::install(&[("docker-registry", "docker-registry"), ("crun", "crun")])?;
            format!("oci:{}", inputs::debian_base(&Cache::open()?)?.display())
        }
    };
    let binary = args.binary.clone().map_or_else(|| install::build(false), Ok)?;
    let mut wrong = Vec::new();
    for page in PAGES {
        let path = repository().join(page);
        let text = fs::read_to_string(&path)?;
        let session = Session::of(&text).with_context(|| format!("{page} has no session"))?;
        let ran = Place::new(&binary, &source)?.run(&session)?;
        if args.check {
            let (expected, found) = (common(&session.text()), common(&ran.text()));
            if expected != found {
                wrong.push(format!("{page} has:\n{expected}\nbut this is what runs:\n{found}"));
            }
        } else {
            fs::write(&path, text.replace(&session.text(), &ran.text()))?;
            if page == DRAWN {
                fs::write(repository().join(PICTURE), draw(&ran.text()))?;
            }
        }
    }
    if wrong.is_empty() { Ok(()) } else { bail!(Failed(wrong.join("\n"))) }
}

/// Commands, each with its output.
#[derive(Debug, PartialEq, Eq)]
struct Session(Vec<(String, String)>);

impl Session {
    /// Returns the first session of a page.
    fn of(page: &str) -> Option<Self> {
        let (_, block) = page.split_once("```console\n")?;
        let (block, _) = block.split_once("```")?;
        let mut all: Vec<(String, String)> = Vec::new();
        for line in block.lines() {
            match (line.strip_prefix("$ "), all.last_mut()) {
                (Some(command), _) => all.push((command.to_owned(), String::new())),
                (None, Some((_, output))) => *output += &format!("{line}\n"),
                (None, None) => return None,
            }
        }
        Some(Self(all))
    }

    /// Returns the text as on a page.
    fn text(&self) -> String {
        self.0.iter().map(|(command, output)| format!("$ {command}\n{output}")).collect()
    }
}

/// A directory with the user's home and store, and the registry.
struct Place {
    // Dropped before the directory.
    _registry: Daemon,
    folder: tempfile::TempDir,
}

impl Place {
    fn new(binary: &Path, source: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
        let registry = Daemon::start(folder.path(), "")?
            .ok_or_else(|| Skipped(format!("{PROGRAM} is not installed")))?;
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("bin"))?;
        // The user cannot read every target directory.
        fs::copy(binary, path("bin/quire"))?;
        let quire = || {
            let mut quire = Command::new(path("bin/quire"));
            quire.arg("--store").arg(path("store")).arg("--quiet");
            quire
        };
        quiet(quire().args(["import", source, "image"]))?;
        for name in NAMES {
            let name = format!("{}/{name}", registry.host);
            quiet(quire().args(["push", "--plain-http", "image", &name]))?;
        }
        let passwd = fs::read_to_string("/etc/passwd")?;
        fs::write(path("passwd"), format!("alice:x:{USER}:{USER}::/:/bin/sh\n{passwd}"))?;
        for name in ["subuid", "subgid"] {
            fs::write(path(name), "alice:2000000000:65536\n")?;
        }
        let mirror = path("home/.config/quire/certs.d/docker.io");
        fs::create_dir_all(&mirror)?;
        let host = &registry.host;
        fs::write(
            mirror.join("hosts.toml"),
            format!("[host.\"http://{host}\"]\ncapabilities = [\"pull\", \"resolve\"]\n"),
        )?;
        chown(path("home"), Some(USER), Some(USER))?;
        Ok(Self { _registry: registry, folder })
    }

    /// Runs the commands, and returns them with their output. A command may fail.
    fn run(&self, session: &Session) -> Result<Session> {
        const MARK: &str = "== next ==\n";
        // The store exists, because the command that makes one prints a remark on file systems without fs-verity.
        let mut script = String::from(
            "cd; mkdir empty; quire --quiet import dir:empty empty > /dev/null 2>&1; quire --quiet rmi empty; \
             quire --quiet gc > /dev/null\n\
             exec 2>&1\n",
        );
        for (command, _) in &session.0 {
            script += &format!("echo '{}'\n{command}\n", MARK.trim_end());
        }
        let path = |name: &str| self.folder.path().join(name);
        fs::write(path("session"), script)?;
        fs::write(path("sandbox"), SANDBOX)?;
        let mut sh = Command::new("unshare");
        sh.args(["--mount", "sh"]).arg(path("sandbox")).arg(self.folder.path());
        let output = sh.stdin(Stdio::null()).output().context("cannot start unshare")?;
        let text = String::from_utf8(output.stdout)?;
        let outputs: Vec<_> = text.split(MARK).skip(1).collect();
        if outputs.len() != session.0.len() {
            let error = String::from_utf8_lossy(&output.stderr);
            bail!(Failed(format!("the session ended early:\n{text}{error}")));
        }
        let pairs = session.0.iter().zip(outputs);
        Ok(Session(pairs.map(|((command, _), output)| (command.clone(), output.into())).collect()))
    }
}

/// Returns the text without the parts that each run changes: numbers, units, digests, and the width of columns.
fn common(text: &str) -> String {
    let mut text = text.to_owned();
    for (pattern, by) in [
        (r"\b[0-9a-f]{64}\b|\b[0-9a-f]{12}\b", "DIGEST"),
        (r"[0-9]+([-.:/][0-9]+)*", "N"),
        (r"\bN (B|[KMG]iB)\b", "SIZE"),
        (r"\bN [a-z]+ ago", "N ago"),
        (r" +", " "),
        (r"(?m) +$", ""),
    ] {
        let pattern = Regex::new(pattern).expect("the patterns above are valid");
        text = pattern.replace_all(&text, by).into_owned();
    }
    text
}

/// Number of columns of the picture. Longer lines continue on the next one, as on a terminal.
const COLUMNS: usize = 100;

/// Draws a session as a dark terminal, in SVG.
fn draw(session: &str) -> String {
    const LINE: usize = 20;
    const EDGE: usize = 24;
    let mut lines = Vec::new();
    for line in session.lines() {
        let letters: Vec<_> = line.chars().collect();
        let is_typed = line.starts_with("$ ");
        // An empty line has no chunk.
        let mut chunks = letters.chunks(COLUMNS).map(|it| it.iter().collect::<String>());
        lines.push((is_typed, chunks.next().unwrap_or_default()));
        lines.extend(chunks.map(|it| (is_typed, it)));
    }
    let (width, height) = (2 * EDGE + COLUMNS * 42 / 5, 2 * EDGE + lines.len() * LINE);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         role=\"img\" aria-label=\"A session of Quire in a terminal\">\n\
         <rect width=\"{width}\" height=\"{height}\" rx=\"8\" fill=\"#1b1f24\"/>\n\
         <g font-family=\"ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace\" font-size=\"14\">\n"
    );
    for (number, (is_typed, line)) in lines.iter().enumerate() {
        let color = if *is_typed { "#7ee787" } else { "#d0d7de" };
        let y = EDGE + (number + 1) * LINE - 6;
        let text = line.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        // Browsers join other spaces.
        let text = text.replace(' ', "\u{a0}");
        // Fixes the width of letters, because columns must be aligned with any font.
        let length = line.chars().count() * 42 / 5;
        if length > 0 {
            svg += &format!(
                "<text x=\"{EDGE}\" y=\"{y}\" fill=\"{color}\" textLength=\"{length}\">{text}</text>\n"
            );
        }
    }
    svg + "</g>\n</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_picture_shows_the_session_of_the_page() {
        let page = fs::read_to_string(repository().join(DRAWN)).unwrap();
        let drawn = draw(&Session::of(&page).unwrap().text());
        let there = fs::read_to_string(repository().join(PICTURE)).unwrap();
        assert!(there == drawn, "`cargo xtask session` draws {PICTURE} again");
    }

    #[test]
    fn a_session_is_read_and_written() {
        let text = "$ a 'b'\n$ c\nd\n\ne\n";
        let session = Session::of(&format!("x\n```console\n{text}```\n")).unwrap();
        assert_eq!(session.0.len(), 2);
        assert_eq!(session.text(), text);
        assert_eq!(Session::of("```console\nnothing typed\n```"), None);
    }

    #[test]
    fn only_what_each_run_changes_is_left_out() {
        let check = |a: &str, b: &str, same: bool| assert_eq!(common(a) == common(b), same, "{a}");
        check(
            "web  running  2026-11-28 14:28:47  1.5 MiB",
            "web running 2025-01-02 04:05:06 3 KiB",
            true,
        );
        check("sound: 5 files", "sound: 4980 files", true);
        check("web  running", "web  exited", false);
        check(&"ab".repeat(32), &"01".repeat(32), true);
        check("7 seconds ago", "1 minute ago", true);
    }
}
