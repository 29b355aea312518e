//! `make install`: installs the binary, its names as a composefs tool, man pages, completions and systemd units.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use clap::builder::{OsStringValueParser, TypedValueParser as _};

use rig::cache::remove;
use rig::process::{quiet, repository, shown, target_dir};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    layout: Layout,
    /// Install this binary instead of building one
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
}

/// Destination and selection of files.
#[derive(Debug, clap::Args)]
pub(crate) struct Layout {
    /// Directory of `bin` and `share`
    #[arg(long, default_value = "/usr/local")]
    pub(crate) prefix: PathBuf,
    /// A directory to put in front of the prefix, for packagers; empty for none
    // Makefiles write `DESTDIR=` for "none", but clap refuses an empty text for a path.
    #[arg(
        long,
        env = "DESTDIR",
        default_value = "",
        value_name = "DIR",
        value_parser = OsStringValueParser::new().map(PathBuf::from)
    )]
    pub(crate) destination: PathBuf,
    /// Directory in which mount(8) looks for `mount.quire` and `mount.composefs`: /usr/sbin for the prefixes /usr and
    /// /usr/local (/sbin if that is another directory), else `sbin` of the prefix
    #[arg(long, value_name = "DIR")]
    pub(crate) helpers: Option<PathBuf>,
    /// Also install the names of the composefs tools, which then come before Debian's on most paths
    #[arg(long)]
    pub(crate) composefs: bool,
}

pub(crate) const COMPOSEFS: [&str; 3] = ["mkcomposefs", "composefs-info", "composefs-dump"];

/// The name by which containerd calls this program. It is only linked beside it: an administrator links it into
/// containerd's directory, because containerd then refuses all images without a policy.
const VERIFIER: &str = "quire-image-verifier";

/// Programs that mount(8) calls.
const HELPERS: [&str; 2] = ["mount.quire", "mount.composefs"];

/// A directory in which mount(8) of all distributions looks for its helpers. Source: util-linux, `configure.ac`,
/// `--enable-fs-paths-default`.
const SBIN: &str = "/sbin";

/// Shell, directory below `share`, and file name.
const COMPLETIONS: [(&str, &str, &str); 3] = [
    ("bash", "bash-completion/completions", "quire"),
    ("zsh", "zsh/site-functions", "_quire"),
    ("fish", "fish/vendor_completions.d", "quire.fish"),
];

pub(crate) fn run(args: &Args) -> Result<()> {
    let binary = args.binary.clone().map_or_else(|| build(false), Ok)?;
    let prefix = lay(&binary, &binary, &args.layout)?;
    println!("installed below {}", prefix.display());
    Ok(())
}

/// Builds the binary, and returns its path.
pub(crate) fn build(debug: bool) -> Result<PathBuf> {
    let mut cargo = Command::new(env!("CARGO"));
    let (profile, folder) = if debug { ("dev", "debug") } else { ("release", "release") };
    cargo.args(["build", "--profile", profile]);
    shown(cargo.current_dir(repository()))?;
    Ok(target_dir()?.join(folder).join("quire"))
}

/// Lays out all files, with the pages and completions that `runs` writes: the binary itself, or the same one for this
/// machine. Returns the directory of `bin` and `share`.
pub(crate) fn lay(binary: &Path, runs: &Path, layout: &Layout) -> Result<PathBuf> {
    let prefix = layout.staged(&layout.prefix);
    let (bin, share) = (prefix.join("bin"), prefix.join("share"));
    fs::create_dir_all(&bin)?;
    // The file of a running program cannot be written, but it can be replaced.
    remove(&bin.join("quire"))?;
    fs::copy(binary, bin.join("quire"))?;
    for name in COMPOSEFS.iter().filter(|_| layout.composefs).chain([&VERIFIER]) {
        remove(&bin.join(name))?;
        symlink("quire", bin.join(name))?;
    }
    link_helpers(layout)?;
    let pages = share.join("man");
    fs::create_dir_all(&pages)?;
    quiet(Command::new(runs).arg("man").arg(&pages))?;
    // Without the tools, their pages would hide those of another package.
    for name in COMPOSEFS.iter().filter(|_| !layout.composefs) {
        remove(&pages.join(format!("man1/{name}.1")))?;
    }
    for (shell, folder, file) in COMPLETIONS {
        let text = quiet(Command::new(runs).args(["completions", shell]))?;
        fs::create_dir_all(share.join(folder))?;
        fs::write(share.join(folder).join(file), text)?;
    }
    let units = prefix.join("lib/systemd/system");
    fs::create_dir_all(&units)?;
    let program = layout.prefix.join("bin/quire").display().to_string();
    for unit in fs::read_dir(repository().join("dist/systemd"))? {
        let unit = unit?;
        let text = fs::read_to_string(unit.path())?;
        fs::write(units.join(unit.file_name()), text.replace("/usr/bin/quire", &program))?;
    }
    Ok(prefix)
}

impl Layout {
    /// Returns the path at which a file is written that will have this path when installed.
    fn staged(&self, path: &Path) -> PathBuf {
        if self.destination.as_os_str().is_empty() {
            path.to_owned()
        } else {
            self.destination.join(path.strip_prefix("/").unwrap_or(path))
        }
    }

    fn helpers(&self) -> PathBuf {
        if let Some(helpers) = &self.helpers {
            return helpers.clone();
        }
        if !["/usr", "/usr/local"].map(Path::new).contains(&&*self.prefix) {
            return self.prefix.join("sbin");
        }
        // If /usr is not merged, mount(8) does not look in /usr/sbin.
        match fs::symlink_metadata(self.staged(Path::new(SBIN))) {
            Ok(found) if found.is_dir() => SBIN.into(),
            _ => "/usr/sbin".into(),
        }
    }
}

/// Links the programs that mount(8) calls to the binary. Those of other packages stay.
fn link_helpers(layout: &Layout) -> Result<()> {
    let folder = layout.helpers();
    let binary = relative(&layout.prefix.join("bin/quire"), &folder);
    fs::create_dir_all(layout.staged(&folder))?;
    for name in HELPERS {
        let helper = layout.staged(&folder.join(name));
        let is_ours = |it: PathBuf| it.file_name() == Some("quire".as_ref());
        if helper.exists() && !fs::read_link(&helper).is_ok_and(is_ours) {
            println!("{} stays, because it is another program", helper.display());
            continue;
        }
        remove(&helper)?;
        symlink(&binary, &helper)?;
    }
    Ok(())
}

/// Returns the path of a file relative to a directory, for a symbolic link. Both paths are absolute.
fn relative(file: &Path, directory: &Path) -> PathBuf {
    let common = file.components().zip(directory.components()).take_while(|(a, b)| a == b).count();
    let up = directory.components().skip(common).map(|_| Component::ParentDir);
    up.chain(file.components().skip(common)).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use clap::{CommandFactory as _, FromArgMatches as _, Parser};

    use super::*;

    #[derive(Debug, Parser)]
    struct Alone {
        #[command(flatten)]
        args: Args,
    }

    /// `make install` as in the README, and as packagers call it. GNU's coding standards, "DESTDIR: Support for
    /// Staged Installs": files contain the prefix without the destination.
    #[test]
    fn files_are_laid_out_below_prefix_and_destination() {
        let folder = tempfile::tempdir().unwrap();
        let binary = folder.path().join("built");
        let script = "#!/bin/sh\n[ \"$1\" = man ] || exec echo \"$@\"\n\
            mkdir -p \"$2/man1\" \"$2/man8\" && cd \"$2\"\n\
            : >man1/quire.1; : >man1/mkcomposefs.1; : >man8/mount.quire.8\n";
        fs::write(&binary, script).unwrap();
        fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).unwrap();
        let binary = binary.to_str().unwrap();
        let check = |name: &str, words: &[&str], installed: &str, helpers: &str, program: &str| {
            let top = folder.path().join(name);
            let words: Vec<_> =
                words.iter().map(|it| it.replace("TOP", top.to_str().unwrap())).collect();
            let words = ["install", "--binary", binary].into_iter().map(String::from).chain(words);
            // Ignores the environment of the `make` that may run this test.
            let command = Alone::command().mut_arg("destination", |it| it.env(None));
            let matches = command.try_get_matches_from(words).unwrap();
            run(&Alone::from_arg_matches(&matches).unwrap().args).unwrap();
            let prefix = top.join(installed);
            for file in ["bin/quire", "share/man/man1/quire.1", "share/man/man8/mount.quire.8"] {
                assert!(prefix.join(file).exists(), "{name}: {file}");
            }
            assert!(!prefix.join("share/man/man1/mkcomposefs.1").exists(), "{name}");
            let binary = prefix.join("bin/quire").canonicalize().unwrap();
            let verifier = prefix.join("bin/quire-image-verifier");
            for link in HELPERS.map(|it| top.join(helpers).join(it)).into_iter().chain([verifier]) {
                assert_eq!(link.canonicalize().ok(), Some(binary.clone()), "{name}: {link:?}");
            }
            for (_, folder, file) in COMPLETIONS {
                assert!(prefix.join("share").join(folder).join(file).exists(), "{name}: {file}");
            }
            let unit = prefix.join("lib/systemd/system/quire-lazy.service");
            let unit = fs::read_to_string(unit).unwrap();
            let program = program.replace("TOP", top.to_str().unwrap());
            assert!(unit.contains(&format!("ExecStart={program} ")), "{name}: {unit}");
        };
        let own = "usr/sbin";
        check("plain", &["--prefix", "TOP/usr"], "usr", own, "TOP/usr/bin/quire");
        let empty = ["--prefix", "TOP/usr", "--destination", ""];
        check("empty", &empty, "usr", own, "TOP/usr/bin/quire");
        check("usual", &["--destination", "TOP"], "usr/local", own, "/usr/local/bin/quire");
        let both = ["--prefix", "/opt/q", "--destination=TOP"];
        check("both", &both, "opt/q", "opt/q/sbin", "/opt/q/bin/quire");
        let all = ["--prefix", "/opt/q", "--destination=TOP", "--helpers", "/sbin"];
        check("all", &all, "opt/q", "sbin", "/opt/q/bin/quire");
        // A host whose /usr is not merged.
        fs::create_dir_all(folder.path().join("old/sbin")).unwrap();
        check("old", &["--destination", "TOP"], "usr/local", "sbin", "/usr/local/bin/quire");
        // A host whose /usr is merged, with a file of another package.
        fs::create_dir_all(folder.path().join("new/usr/sbin")).unwrap();
        symlink("usr/sbin", folder.path().join("new/sbin")).unwrap();
        check("new", &["--destination", "TOP"], "usr/local", own, "/usr/local/bin/quire");
        let other = folder.path().join("new/usr/sbin/mount.composefs");
        fs::remove_file(&other).unwrap();
        fs::write(&other, "of another package").unwrap();
        let layout = Layout {
            prefix: "/usr/local".into(),
            destination: folder.path().join("new"),
            helpers: None,
            composefs: true,
        };
        lay(Path::new(binary), Path::new(binary), &layout).unwrap();
        assert_eq!(fs::read_to_string(&other).unwrap(), "of another package");
        let page = layout.destination.join("usr/local/share/man/man1/mkcomposefs.1");
        assert!(page.exists(), "the tools are there, too");
    }
}
