//! Sets `QUIRE_VERSION`, the text of `quire --version`: the version, and the commit if it is known.

use std::path::Path;
use std::process::Command;

/// Digits of a commit's hash that the version has.
const DIGITS: usize = 12;

fn main() {
    let folder = env("CARGO_MANIFEST_DIR");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=commit");
    println!("cargo::rerun-if-env-changed=QUIRE_COMMIT");
    let commit = std::env::var("QUIRE_COMMIT").ok().filter(|it| !it.is_empty());
    let commit = commit.or_else(|| of_archive(&folder)).or_else(|| of_git(&folder));
    let version = env("CARGO_PKG_VERSION");
    match commit {
        Some(commit) => println!("cargo::rustc-env=QUIRE_VERSION={version} ({commit})"),
        None => println!("cargo::rustc-env=QUIRE_VERSION={version}"),
    }
}

fn env(name: &str) -> String {
    std::env::var(name).expect("cargo sets it")
}

/// Returns the commit of a source tarball. git writes the commit into this file when it makes the tarball
/// (gitattributes(5), `export-subst`).
fn of_archive(folder: &str) -> Option<String> {
    let text = std::fs::read_to_string(Path::new(folder).join("commit")).ok()?;
    let commit = text.trim_end().get(..DIGITS)?;
    commit.bytes().all(|it| it.is_ascii_hexdigit()).then(|| commit.to_owned())
}

/// Returns the commit of this repository, with `-dirty` if tracked files were changed. Optimized builds only: a build
/// of a developer would be repeated for each commit.
fn of_git(folder: &str) -> Option<String> {
    if env("PROFILE") != "release" {
        return None;
    }
    // Fails if this folder is in a repository that does not track it, such as that of a distribution's packages.
    let _tracked = git(folder, &["ls-files", "--error-unmatch", "build.rs"])?;
    // These files change with the commit. The sources of all crates decide about `-dirty`.
    for file in ["HEAD", "logs/HEAD"] {
        let path = git(folder, &["rev-parse", "--path-format=absolute", "--git-path", file])?;
        println!("cargo::rerun-if-changed={path}");
    }
    for path in ["..", "../../Cargo.toml", "../../Cargo.lock"] {
        println!("cargo::rerun-if-changed={path}");
    }
    let hash = git(folder, &["rev-parse", "HEAD"])?;
    let changes = git(folder, &["status", "--porcelain", "--untracked-files=no"])?;
    let dirty = if changes.is_empty() { "" } else { "-dirty" };
    Some(format!("{}{dirty}", hash.get(..DIGITS)?))
}

fn git(folder: &str, words: &[&str]) -> Option<String> {
    let mut git = Command::new("git");
    // The index stays as it is, because cargo would take a new one for a change.
    git.args(["--no-optional-locks", "-C", folder]).args(words);
    let output = git.output().ok().filter(|it| it.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim_end().to_owned())
}
