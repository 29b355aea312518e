//! `cargo xtask deb`: makes a package for Debian and its derivatives, with the files that `install` installs.
//!
//! All files of the package are first laid out below [`STAGE`]; `crates/cli/Cargo.toml` defines how cargo-deb takes
//! them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use rig::cache::{Cache, remove};
use rig::process::{is_root, need, quiet, quire, repository, target_dir};
use rig::{Failed, Skipped, inputs, tools};

use crate::install::{self, Layout};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Output directory
    #[arg(long, default_value = "target/debian")]
    output: PathBuf,
    /// Maintainer as `NAME <ADDRESS>`, for packages that are distributed
    #[arg(long, value_name = "WHO", default_value = MAINTAINER)]
    maintainer: String,
    /// Build without optimization, to try the package
    #[arg(long)]
    debug: bool,
    /// Only test: package the quire that was built last, install it in a Debian root, and remove it again
    #[arg(long, conflicts_with_all = ["output", "debug"])]
    trial: bool,
}

/// Maintainer of a package that is not distributed.
pub(crate) const MAINTAINER: &str = "Quire <quire@localhost>";

/// The same path as in `crates/cli/Cargo.toml`.
const STAGE: &str = "target/deb";

/// The AppArmor profile of containers, in the directory from which AppArmor's service loads profiles at boot.
/// Administrators may change it, so the package declares it as a configuration file.
const APPARMOR: &str = "etc/apparmor.d/quire-default";

/// Files of this repository that only Debian needs, and their paths in the package. cargo-deb compresses the second
/// one.
const DEBIAN: [(&str, &str); 4] = [
    ("dist/debian/copyright", "usr/share/doc/quire/copyright"),
    ("CHANGELOG.md", "usr/share/doc/quire/changelog"),
    ("dist/debian/lintian-overrides", "usr/share/lintian/overrides/quire"),
    ("crates/container/src/bundle/security/apparmor.profile", APPARMOR),
];

/// Contents and properties of a package.
#[derive(Debug)]
pub(crate) struct Package<'a> {
    pub(crate) binary: &'a Path,
    /// A binary that this machine can run, which writes man pages and completions.
    pub(crate) runs: &'a Path,
    /// Notices of the software in the binary.
    pub(crate) notices: Option<&'a Path>,
    pub(crate) maintainer: &'a str,
    /// The binary's target triple, if it is not this machine's.
    pub(crate) target: Option<&'a str>,
    /// Whether to compress little.
    pub(crate) is_fast: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let cache = Cache::open()?;
    let cargo_deb = tools::cargo_deb(&cache)?;
    let binary = if args.trial { quire()? } else { install::build(args.debug)? };
    let package = Package {
        binary: &binary,
        runs: &binary,
        notices: None,
        maintainer: &args.maintainer,
        target: None,
        is_fast: args.debug || args.trial,
    };
    let package = package.make(&cargo_deb)?;
    if args.trial {
        return try_out(&package, &cache);
    }
    fs::create_dir_all(&args.output)
        .with_context(|| format!("cannot make {}", args.output.display()))?;
    let path = args.output.join(package.file_name().context("the package has a name")?);
    fs::copy(package, &path)?;
    println!("{}", path.display());
    Ok(())
}

impl Package<'_> {
    /// Makes the package with cargo-deb, and returns its path.
    pub(crate) fn make(&self, cargo_deb: &Path) -> Result<PathBuf> {
        // cargo-deb uses it to find the libraries that the binary needs.
        tools::install(&[("dpkg-shlibdeps", "dpkg-dev")])?;
        let stage = repository().join(STAGE);
        remove(&stage)?;
        lay(self.binary, self.runs, &stage)?;
        if let Some(notices) = self.notices {
            let path = stage.join("usr/share/doc/quire/THIRD-PARTY-NOTICES.txt");
            fs::write(path, fs::read(notices)?)?;
        }
        // The time of the last commit, so that the same commit always gives the same package.
        let mut git = Command::new("git");
        git.args(["log", "-1", "--format=%ct %cD"]).current_dir(repository());
        let commit = quiet(&mut git)?;
        let (seconds, date) = commit.trim_end().split_once(' ').context("git says no time")?;
        write_changelog(&stage, self.maintainer, date)?;
        // A directory for one file, whose name cargo-deb chooses.
        let made = stage.join("made");
        let mut command = Command::new(cargo_deb);
        command.args(["--no-build", "--no-strip", "--quiet", "--maintainer", self.maintainer]);
        command.args(["--manifest-path", "crates/cli/Cargo.toml", "--output"]).arg(&made);
        if let Some(target) = self.target {
            command.args(["--target", target]);
        }
        if self.is_fast {
            command.arg("--fast");
        }
        quiet(command.env("SOURCE_DATE_EPOCH", seconds).current_dir(repository()))?;
        let package = fs::read_dir(&made)?.next().context("cargo-deb made no package")??;
        compare(&package.path(), &stage)?;
        Ok(package.path())
    }
}

/// Lays out the files of the package, except for Debian's changelog.
fn lay(binary: &Path, runs: &Path, stage: &Path) -> Result<()> {
    let layout = Layout {
        prefix: "/usr".into(),
        destination: stage.to_owned(),
        helpers: None,
        composefs: true,
    };
    let share = install::lay(binary, runs, &layout)?.join("share");
    // Debian's zsh looks for completions from packages only in this directory.
    fs::rename(share.join("zsh/site-functions"), share.join("zsh/vendor-completions"))?;
    for (from, to) in DEBIAN {
        let to = stage.join(to);
        fs::create_dir_all(to.parent().expect("DEBIAN has paths with folders"))?;
        fs::write(to, fs::read(repository().join(from))?)?;
    }
    Ok(())
}

/// Debian requires a changelog of the package besides Quire's, in a separate format.
fn write_changelog(stage: &Path, maintainer: &str, date: &str) -> Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    let text = format!(
        "quire ({version}-1) unstable; urgency=medium\n\n  \
         * /usr/share/doc/quire/changelog.gz has the changes.\n\n \
         -- {maintainer}  {date}\n"
    );
    let path = stage.join("usr/share/doc/quire/changelog.Debian");
    fs::write(&path, text)?;
    quiet(Command::new(need("gzip")?).args(["-9", "--no-name"]).arg(path)).map(drop)
}

/// Returns the files that were laid out.
fn laid(stage: &Path) -> Result<BTreeSet<String>> {
    let mut found = files(stage, "usr")?;
    found.append(&mut files(stage, "etc")?);
    Ok(found)
}

/// Checks that the package has exactly the files that were laid out.
fn compare(package: &Path, stage: &Path) -> Result<()> {
    let extracted = stage.join("extracted");
    let dpkg = need("dpkg-deb")?;
    quiet(Command::new(&dpkg).arg("--extract").arg(package).arg(&extracted))?;
    let (laid, packaged) = (laid(stage)?, files(&extracted, "")?);
    same("the package", &unpacked(&laid), &unpacked(&packaged))?;
    // cargo-deb writes its own licence file unless its configuration names one.
    for path in laid.intersection(&packaged) {
        if fs::read(stage.join(path))? != fs::read(extracted.join(path))? {
            bail!(Failed(format!("the package has another {path}")));
        }
        // cargo-deb copies the targets of symbolic links unless it is configured to keep the links.
        if fs::read_link(stage.join(path)).ok() != fs::read_link(extracted.join(path)).ok() {
            bail!(Failed(format!("the package has a copy of what the link {path} leads to")));
        }
    }
    let configuration = quiet(Command::new(&dpkg).arg("--info").arg(package).arg("conffiles"))?;
    if configuration.trim() != format!("/{APPARMOR}") {
        bail!(Failed(format!("these are configuration files of the package: {configuration:?}")));
    }
    Ok(())
}

/// Returns the names without the suffix that cargo-deb adds to man pages and changelogs.
fn unpacked<'a>(names: impl IntoIterator<Item = &'a String>) -> BTreeSet<String> {
    let names = names.into_iter().map(|it| it.strip_suffix(".gz").unwrap_or(it));
    names.map(String::from).collect()
}

/// Returns the files at or below `folder` of `root`, as paths relative to `root`.
fn files(root: &Path, folder: &str) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(root.join(folder))? {
        let entry = entry?;
        let name = entry.file_name().into_string();
        let name = name.map_err(|name| anyhow::anyhow!("{} is no UTF-8", name.display()))?;
        let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
        if entry.file_type()?.is_dir() {
            found.append(&mut files(root, &path)?);
        } else {
            found.insert(path);
        }
    }
    Ok(found)
}

fn same(what: &str, expected: &BTreeSet<String>, found: &BTreeSet<String>) -> Result<()> {
    let missing: Vec<_> = expected.difference(found).collect();
    let strange: Vec<_> = found.difference(expected).collect();
    if !missing.is_empty() || !strange.is_empty() {
        bail!(Failed(format!("{what}: not there: {missing:?}; not expected: {strange:?}")));
    }
    Ok(())
}

/// Files that dpkg and its helpers write for themselves.
const REMEMBERED: [&str; 3] = ["var/lib/dpkg/", "var/log/dpkg.log", "var/lib/systemd/"];

/// The link to a unit that the package enables. Source: systemctl(1), "enable".
const ENABLED: &str = "etc/systemd/system/timers.target.wants/quire-gc.timer";

/// Installs the package in a Debian root, upgrades it to itself, removes and purges it. Only files of users may
/// remain.
fn try_out(package: &Path, cache: &Cache) -> Result<()> {
    if !is_root() {
        bail!(Skipped(String::from("a chroot needs root")));
    }
    let base = inputs::debian_root(cache)?;
    let place = tempfile::tempdir_in(target_dir()?)?;
    let root = place.path().join("root");
    quiet(Command::new("cp").args(["-a", "--reflink=auto"]).arg(&base).arg(&root))?;
    fs::copy(package, root.join("quire.deb"))?;
    let users = ["var/lib/quire/kept", "etc/quire/serve.toml"];
    for path in users.map(|it| root.join(it)) {
        fs::create_dir_all(path.parent().expect("there are folders in it"))?;
        fs::write(path, "")?;
    }
    let inside = |words: &[&str]| {
        let mut chroot = Command::new("chroot");
        chroot.arg(&root).args(words).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        quiet(chroot.env("LC_ALL", "C").env("DEBIAN_FRONTEND", "noninteractive"))
    };
    let now = || -> Result<BTreeSet<String>> {
        let mut found = files(&root, "")?;
        found.retain(|it| !REMEMBERED.iter().any(|known| it.starts_with(known)));
        Ok(found)
    };
    let before = now()?;
    for step in ["install", "upgrade"] {
        inside(&["dpkg", "--install", "/quire.deb"])?;
        inside(&["quire", "--version"])?;
        let mut laid = laid(&repository().join(STAGE))?;
        laid.insert(ENABLED.to_owned());
        same(step, &unpacked(&laid), &unpacked(now()?.difference(&before)))?;
    }
    inside(&["dpkg", "--remove", "quire"])?;
    inside(&["dpkg", "--purge", "quire"])?;
    same("purge", &before, &now()?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// A script in place of the binary, with the subcommands that `install` calls: pages of three sections, one of
    /// them of a new verb, and a completion.
    const BINARY: &str = r#"#!/bin/sh
case $1 in
    man)
        mkdir "$2/man1" "$2/man5" "$2/man8"
        touch "$2/man1/quire.1" "$2/man1/quire-new.1" "$2/man1/mkcomposefs.1"
        touch "$2/man5/quire-policy.toml.5" "$2/man8/mount.quire.8"
        ;;
    completions) echo "$2" ;;
esac
"#;

    /// Returns `[package.metadata.deb]`.
    fn metadata() -> serde_json::Value {
        let mut cargo = rig::process::cargo();
        let printed =
            quiet(cargo.args(["metadata", "--no-deps", "--offline", "--format-version=1"]));
        let mut all: serde_json::Value = serde_json::from_str(&printed.unwrap()).unwrap();
        let mut packages = all["packages"].as_array_mut().unwrap().iter_mut();
        packages.find(|it| it["name"] == "quire-cli").unwrap()["metadata"]["deb"].take()
    }

    #[test]
    fn the_package_has_all_that_is_installed() {
        let place = tempfile::tempdir().unwrap();
        let (binary, stage) = (place.path().join("binary"), place.path().join("stage"));
        // Written by a shell, because a program that another test starts at the same time could inherit this file
        // open for writing, so that it could not be executed.
        let mut shell = Command::new("sh");
        shell.args(["-c", r#"printf %s "$1" > "$2" && chmod 755 "$2""#, "sh", BINARY]);
        quiet(shell.arg(&binary)).unwrap();
        lay(&binary, &binary, &stage).unwrap();

        let deb = metadata();
        let assets = deb["assets"].as_array().unwrap().iter().map(|asset| {
            let [source, target, mode] = [0, 1, 2].map(|it| asset[it].as_str().unwrap());
            let source = source.strip_prefix(&format!("../../{STAGE}/")).unwrap();
            let (folder, is_deep) = match source.strip_suffix("**/*") {
                Some(folder) => (folder, true),
                None => (source.strip_suffix('*').unwrap(), false),
            };
            assert_eq!(folder, target, "the package has files where they are laid out");
            (folder, is_deep, mode)
        });
        let assets: Vec<_> = assets.collect();
        let laid = files(&stage, "").unwrap();
        for path in &laid {
            let takers = assets.iter().filter(|(folder, is_deep, _)| {
                path.strip_prefix(folder).is_some_and(|rest| *is_deep || !rest.contains('/'))
            });
            let modes: Vec<_> = takers.map(|(.., mode)| *mode).collect();
            let mode = stage.join(path).metadata().unwrap().permissions().mode();
            let expected = if mode & 0o100 == 0 { "644" } else { "755" };
            assert_eq!(modes, [expected], "{path}");
        }
        let named = |it: &str| laid.iter().filter(|path| path.starts_with(it)).count();
        assert_eq!([1, 5, 8].map(|it| named(&format!("usr/share/man/man{it}/"))), [3, 1, 1]);
        assert_eq!(named("usr/sbin/mount."), 2);
        let units = fs::read_dir(repository().join("dist/systemd")).unwrap();
        assert_eq!(named("usr/lib/systemd/system/"), units.count());
    }

    /// Debian Policy 10.1, "Binaries": two packages may not install different programs with the same name.
    #[test]
    fn the_package_takes_the_place_of_composefs() {
        let deb = metadata();
        for key in ["conflicts", "replaces", "provides"] {
            assert_eq!(deb[key], "composefs", "{key}");
        }
    }

    #[test]
    fn the_scripts_are_for_all_units() {
        let deb = metadata();
        // Without this directory, cargo-deb makes no scripts.
        assert!(deb["maintainer-scripts"].is_string());
        // An entry with a name applies to one unit.
        let [timer, all] = [0, 1].map(|it| &deb["systemd-units"][it]);
        assert!(all["unit-name"].is_null() && all["enable"] == false && all["start"] == false);
        assert!(timer["unit-name"] == "quire-gc" && timer["enable"] == true);
        assert_eq!(deb["systemd-units"].as_array().unwrap().len(), 2);
    }

    /// Runs the postinst script with a parser that records its arguments.
    #[test]
    fn the_profile_is_loaded_where_apparmor_is_on() {
        let script = fs::read_to_string(repository().join("dist/debian/postinst")).unwrap();
        // cargo-deb inserts its commands for the units at this marker.
        assert_eq!(script.matches("\n#DEBHELPER#\n").count(), 1);
        assert_eq!(metadata()["conf-files"][0], format!("/{APPARMOR}"));
        let check = |enabled: &str, has_parser: bool, step: &str, expect: &str| {
            let place = tempfile::tempdir().unwrap();
            let [state, noted] = ["enabled", "noted"].map(|it| place.path().join(it));
            fs::write(&state, enabled).unwrap();
            fs::write(&noted, "").unwrap();
            let parser =
                format!("apparmor_parser() {{ echo \"$@\" >>{}; false; }}\n", noted.display());
            let parser = if has_parser { parser.as_str() } else { "" };
            let script =
                script.replace("/sys/module/apparmor/parameters/enabled", state.to_str().unwrap());
            // Runs without this machine's programs, so that only the script's own functions are found.
            let mut shell = Command::new("/bin/sh");
            shell
                .args(["-ec", &format!("{parser}cat() {{ read -r it <$1; echo $it; }}\n{script}")]);
            quiet(shell.args(["postinst", step]).env("PATH", "/nowhere")).unwrap();
            assert_eq!(
                fs::read_to_string(&noted).unwrap(),
                expect,
                "{enabled} {has_parser} {step}"
            );
        };
        let loads = format!("--replace --skip-cache /{APPARMOR}\n");
        check("Y\n", true, "configure", &loads);
        check("Y\n", false, "configure", "");
        check("N\n", true, "configure", "");
        check("Y\n", true, "abort-upgrade", "");
    }
}
