//! `make install`: the binary, the names it has as a composefs tool, man pages, completions and units for systemd.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
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

/// Where files go, and which.
#[derive(Debug, clap::Args)]
pub(crate) struct Layout {
    /// Where `bin` and `share` are
    #[arg(long, default_value = "/usr/local")]
    pub(crate) prefix: PathBuf,
    /// A folder to put in front of the prefix, for packagers; empty for none
    // `DESTDIR=` is how makefiles write "none", and clap takes no empty text for a path.
    #[arg(
        long,
        env = "DESTDIR",
        default_value = "",
        value_name = "DIR",
        value_parser = OsStringValueParser::new().map(PathBuf::from)
    )]
    pub(crate) destination: PathBuf,
    /// Also under the names of the composefs tools, which then come before Debian's on most paths
    #[arg(long)]
    pub(crate) composefs: bool,
}

const COMPOSEFS: [&str; 4] = ["mkcomposefs", "composefs-info", "composefs-dump", "mount.composefs"];

/// Shell, folder below `share`, and the file's name there.
const COMPLETIONS: [(&str, &str, &str); 3] = [
    ("bash", "bash-completion/completions", "quire"),
    ("zsh", "zsh/site-functions", "_quire"),
    ("fish", "fish/vendor_completions.d", "quire.fish"),
];

pub(crate) fn run(args: &Args) -> Result<()> {
    let binary = args.binary.clone().map_or_else(|| build(false), Ok)?;
    let prefix = lay(&binary, &args.layout)?;
    println!("installed below {}", prefix.display());
    Ok(())
}

/// Returns the new binary's path.
pub(crate) fn build(debug: bool) -> Result<PathBuf> {
    let mut cargo = Command::new(env!("CARGO"));
    let (profile, folder) = if debug { ("dev", "debug") } else { ("release", "release") };
    cargo.args(["build", "--profile", profile]);
    shown(cargo.current_dir(repository()))?;
    Ok(target_dir()?.join(folder).join("quire"))
}

/// Lays out all files, with the pages and completions that this binary makes. Returns where `bin` and `share` are.
pub(crate) fn lay(binary: &Path, layout: &Layout) -> Result<PathBuf> {
    let prefix = if layout.destination.as_os_str().is_empty() {
        layout.prefix.clone()
    } else {
        layout.destination.join(layout.prefix.strip_prefix("/").unwrap_or(&layout.prefix))
    };
    let (bin, share) = (prefix.join("bin"), prefix.join("share"));
    fs::create_dir_all(&bin)?;
    // A running program's file cannot be written, but it can be replaced.
    remove(&bin.join("quire"))?;
    fs::copy(binary, bin.join("quire"))?;
    for name in COMPOSEFS.iter().filter(|_| layout.composefs) {
        remove(&bin.join(name))?;
        symlink("quire", bin.join(name))?;
    }
    // Where mount(8) looks, if the prefix is /usr.
    let helper = prefix.join("sbin/mount.quire");
    fs::create_dir_all(prefix.join("sbin"))?;
    remove(&helper)?;
    symlink("../bin/quire", &helper)?;
    let pages = share.join("man/man1");
    fs::create_dir_all(&pages)?;
    quiet(Command::new(binary).arg("man").arg(&pages))?;
    for (shell, folder, file) in COMPLETIONS {
        let text = quiet(Command::new(binary).args(["completions", shell]))?;
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

    /// `make install` as the README has it, and as packagers call it. GNU's coding standards, "DESTDIR: Support for Staged
    /// Installs": the prefix goes into files without the destination.
    #[test]
    fn files_are_laid_out_below_prefix_and_destination() {
        let folder = tempfile::tempdir().unwrap();
        let binary = folder.path().join("built");
        let script = "#!/bin/sh\n[ \"$1\" = man ] && : > \"$2/quire.1\" || echo \"$@\"\n";
        fs::write(&binary, script).unwrap();
        fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).unwrap();
        let binary = binary.to_str().unwrap();
        let check = |name: &str, words: &[&str], installed: &str, program: &str| {
            let top = folder.path().join(name);
            let words: Vec<_> =
                words.iter().map(|it| it.replace("TOP", top.to_str().unwrap())).collect();
            let words = ["install", "--binary", binary].into_iter().map(String::from).chain(words);
            // Without the environment of the `make` that may run this test.
            let command = Alone::command().mut_arg("destination", |it| it.env(None));
            let matches = command.try_get_matches_from(words).unwrap();
            run(&Alone::from_arg_matches(&matches).unwrap().args).unwrap();
            let prefix = top.join(installed);
            for file in ["bin/quire", "sbin/mount.quire", "share/man/man1/quire.1"] {
                assert!(prefix.join(file).exists(), "{name}: {file}");
            }
            for (_, folder, file) in COMPLETIONS {
                assert!(prefix.join("share").join(folder).join(file).exists(), "{name}: {file}");
            }
            let unit = prefix.join("lib/systemd/system/quire-lazy.service");
            let unit = fs::read_to_string(unit).unwrap();
            let program = program.replace("TOP", top.to_str().unwrap());
            assert!(unit.contains(&format!("ExecStart={program} ")), "{name}: {unit}");
        };
        check("plain", &["--prefix", "TOP/usr"], "usr", "TOP/usr/bin/quire");
        check("empty", &["--prefix", "TOP/usr", "--destination", ""], "usr", "TOP/usr/bin/quire");
        check("usual", &["--destination", "TOP"], "usr/local", "/usr/local/bin/quire");
        check("both", &["--prefix", "/opt/q", "--destination=TOP"], "opt/q", "/opt/q/bin/quire");
    }
}
