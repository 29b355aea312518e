//! Lays out and writes the tarballs of a release.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use rig::cache::remove;
use rig::process::{need, quiet, repository};

use super::Commit;
use super::documents::Documents;
use crate::install::{self, Layout};

/// Files of the repository, and their names in the tarball.
const FILES: [(&str, &str); 5] = [
    ("README.md", "README.md"),
    ("CHANGELOG.md", "CHANGELOG.md"),
    ("LICENSE-APACHE", "LICENSE-APACHE"),
    ("LICENSE-MIT", "LICENSE-MIT"),
    ("dist/install.sh", "install.sh"),
];

/// Compresses well and gives the same bytes on any number of processors.
const XZ: [&str; 3] = ["xz", "-9", "--threads=1"];

/// Writes the sources of the last commit to an empty directory. Their times are the current time, because cargo
/// compares times to find changed files.
pub(super) fn export(folder: &Path) -> Result<()> {
    remove(folder)?;
    fs::create_dir_all(folder)?;
    let mut tar = Command::new(need("tar")?);
    tar.args(["--extract", "--touch", "--file=-", "--directory"]).arg(folder);
    pipe(&mut archive(), &mut tar)
}

/// Writes a tarball of the sources of the last commit. It contains the commit's hash, which `crates/cli/build.rs`
/// reads.
pub(super) fn source_tarball(path: &Path, top: &str) -> Result<()> {
    let mut xz = Command::new(need(XZ[0])?);
    xz.args(&XZ[1..]).stdout(fs::File::create(path)?);
    pipe(archive().arg(format!("--prefix={top}/")), &mut xz)
}

fn archive() -> Command {
    let mut git = Command::new("git");
    git.args(["archive", "--format=tar", "HEAD"]).current_dir(repository());
    git
}

/// Runs `from | to`.
fn pipe(from: &mut Command, to: &mut Command) -> Result<()> {
    let mut child = from.stdout(Stdio::piped()).spawn().context("cannot start git")?;
    let output = child.stdout.take().expect("stdout is piped");
    let read = to.stdin(output).status()?;
    let written = child.wait()?;
    if !written.success() || !read.success() {
        bail!("{}: {written}, {read}", rig::process::line(from));
    }
    Ok(())
}

/// Lays out the tarball's files below `top`, as below a prefix, with the script that installs them. `runs` is a binary
/// that this machine can run.
pub(super) fn lay(binary: &Path, runs: &Path, documents: &Documents, top: &Path) -> Result<()> {
    let place = top.parent().context("the top directory has a parent")?;
    // `install.sh` replaces this prefix.
    let layout = Layout {
        prefix: "/usr".into(),
        destination: place.to_owned(),
        helpers: None,
        // `install.sh` leaves the names and pages of these tools out without `--composefs`.
        composefs: true,
    };
    let prefix = install::lay(binary, runs, &layout)?;
    for name in install::COMPOSEFS {
        fs::remove_file(prefix.join("bin").join(name))?;
    }
    fs::rename(&prefix, top)?;
    for (from, to) in FILES {
        fs::copy(repository().join(from), top.join(to))?;
    }
    fs::copy(&documents.notices, top.join("THIRD-PARTY-NOTICES.txt"))?;
    Ok(())
}

/// Writes a directory as a tarball, always with the same bytes.
pub(super) fn tarball(top: &Path, path: &Path, commit: &Commit) -> Result<()> {
    let name = top.file_name().context("the top directory has a name")?;
    let mut tar = Command::new(need("tar")?);
    tar.args(["--create", "--format=gnu", "--sort=name", "--numeric-owner"]);
    // The builder's umask and user do not matter.
    tar.args(["--owner=0", "--group=0", "--mode=u=rwX,go=rX"]);
    tar.arg(format!("--mtime=@{}", commit.seconds));
    tar.arg(format!("--use-compress-program={}", XZ.join(" ")));
    tar.arg("--file").arg(path).arg("--directory").arg(top.parent().unwrap_or(top)).arg(name);
    quiet(&mut tar).map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// A script in place of the binary.
    const BINARY: &str = "#!/bin/sh\n[ \"$1\" = man ] || exec echo \"$@\"\n\
        mkdir \"$2/man1\" && cd \"$2/man1\" && : >quire.1 && : >mkcomposefs.1\n";

    fn commit() -> Commit {
        Commit { hash: "0123456789ab".to_owned(), seconds: "1700000000".to_owned() }
    }

    /// Lays out a tarball in a new directory below `place`, and returns its top.
    fn laid(place: &Path, name: &str) -> std::path::PathBuf {
        let documents = Documents { notices: place.join("notices"), bill: place.join("bill") };
        fs::write(&documents.notices, "notices").unwrap();
        let binary = place.join("binary");
        // Written by a shell, because a program that another test starts at the same time could inherit this file
        // open for writing, so that it could not be executed.
        let mut shell = Command::new("sh");
        shell.args(["-c", r#"printf %s "$1" > "$2" && chmod 755 "$2""#, "sh", BINARY]);
        quiet(shell.arg(&binary)).unwrap();
        let top = place.join(name).join("quire-1-x86_64-linux");
        lay(&binary, &binary, &documents, &top).unwrap();
        top
    }

    #[test]
    fn tarballs_depend_on_the_files_alone() {
        let place = tempfile::tempdir().unwrap();
        let [one, two] = ["one", "two"].map(|it| laid(place.path(), it));
        // Another umask.
        fs::set_permissions(two.join("README.md"), fs::Permissions::from_mode(0o600)).unwrap();
        let [first, second] = [one, two].map(|top| {
            let path = top.with_extension("tar.xz");
            tarball(&top, &path, &commit()).unwrap();
            path
        });
        assert!(fs::read(&first).unwrap() == fs::read(&second).unwrap());
        let mut tar = Command::new("tar");
        let list = quiet(tar.args(["--utc", "-tvJf"]).arg(first)).unwrap();
        for line in list.lines() {
            assert!(line.contains(" 0/0 ") || line.contains(" root/root "), "{line}");
            assert!(line.contains("2023-11-14 22:13"), "{line}");
        }
        let has = |it: &str| assert!(list.contains(it), "{it} is not in\n{list}");
        has("-rwxr-xr-x");
        has("quire-1-x86_64-linux/bin/quire\n");
        has("quire-1-x86_64-linux/install.sh\n");
        has("quire-1-x86_64-linux/lib/systemd/system/quire-gc.timer\n");
        has("quire-1-x86_64-linux/share/man/man1/quire.1\n");
        has("quire-1-x86_64-linux/share/bash-completion/completions/quire\n");
        has("quire-1-x86_64-linux/LICENSE-MIT\n");
        has("quire-1-x86_64-linux/THIRD-PARTY-NOTICES.txt\n");
        has("sbin/mount.quire -> ../bin/quire\n");
        has("bin/quire-image-verifier -> quire\n");
    }

    /// Programs that Quire calls are named with the command that installs them.
    #[test]
    fn the_script_names_missing_programs() {
        let place = tempfile::tempdir().unwrap();
        let top = laid(place.path(), "one");
        let programs = place.path().join("programs");
        fs::create_dir(&programs).unwrap();
        let add = |name: &str, target: &Path| {
            std::os::unix::fs::symlink(target, programs.join(name)).unwrap();
        };
        for name in "chmod cp dirname find ln mkdir mv readlink rm sed".split(' ') {
            add(name, &need(name).unwrap());
        }
        let truth = need("true").unwrap();
        let check = |expect: &str| {
            let mut script = Command::new(need("sh").unwrap());
            script.arg(top.join("install.sh")).env("PATH", &programs).env_remove("DESTDIR");
            script.arg("--prefix").arg(place.path().join("prefix"));
            let printed = quiet(&mut script).unwrap();
            let lines = printed.lines().skip(1).filter(|it| !it.starts_with("systemd reads"));
            assert_eq!(lines.collect::<Vec<_>>().join("\n"), expect);
        };
        let all = "Quire calls these programs, which are not installed: newuidmap, pasta, \
            fusermount3, crun or runc";
        check(all);
        add("dnf", &truth);
        check(&format!("{all}\nto install them: dnf install shadow-utils passt fuse3 crun"));
        add("apt-get", &truth);
        check(&format!("{all}\nto install them: apt-get install uidmap passt fuse3 crun"));
        add("runc", &truth);
        add("pasta", &truth);
        check(
            "Quire calls these programs, which are not installed: newuidmap, fusermount3\n\
            to install them: apt-get install uidmap fuse3",
        );
        add("newuidmap", &truth);
        add("fusermount3", &truth);
        check("");
    }

    /// `install.sh` installs what `cargo xtask install` installs, and removes all of it.
    #[test]
    fn the_script_installs_and_uninstalls() {
        let place = tempfile::tempdir().unwrap();
        let top = laid(place.path(), "one");
        let binary = place.path().join("binary");
        let run = |destination: &Path, words: &[&str]| {
            let mut script = Command::new("sh");
            quiet(script.arg(top.join("install.sh")).args(words).env("DESTDIR", destination))
                .unwrap()
        };
        let files = |folder: &Path| {
            let mut find = Command::new("find");
            // Modes would depend on the umask.
            find.current_dir(folder).args([".", "!", "-type", "d", "-printf", "%P %l\n"]);
            let mut lines: Vec<_> = quiet(&mut find).unwrap().lines().map(String::from).collect();
            lines.sort();
            lines
        };
        let check = |name: &str, prefix: &str, composefs: bool| {
            let [ours, script] = ["ours", "script"].map(|it| place.path().join(name).join(it));
            let layout = Layout {
                prefix: prefix.into(),
                destination: ours.clone(),
                helpers: None,
                composefs,
            };
            install::lay(&binary, &binary, &layout).unwrap();
            let mut words = vec!["--prefix", prefix];
            words.extend(composefs.then_some("--composefs"));
            run(&script, &words);
            let documents = format!("{}/share/doc/quire/", prefix.trim_start_matches('/'));
            let (documents, installed): (Vec<_>, Vec<_>) =
                files(&script).into_iter().partition(|it| it.starts_with(&documents));
            assert_eq!(documents.len(), 4, "{name}: {documents:?}");
            assert_eq!(installed, files(&ours), "{name}");
            let unit = format!("{}/lib/systemd/system/quire-lazy.service", &prefix[1..]);
            let [unit, expected] = [&script, &ours].map(|it| fs::read(it.join(&unit)).unwrap());
            assert!(unit == expected, "{name}");
            let stranger = script.join(&prefix[1..]).join("bin/stranger");
            fs::write(&stranger, "").unwrap();
            words.push("--uninstall");
            run(&script, &words);
            assert_eq!(files(&script).len(), 1, "{name}: {:?}", files(&script));
        };
        check("local", "/usr/local", false);
        check("usr", "/usr", true);
        check("opt", "/opt/quire", true);
    }
}
