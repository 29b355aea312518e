//! `make install`: the binary, the names it has as a composefs tool, man pages, completions and units for systemd.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use rig::cache::remove;
use rig::process::{quiet, repository, shown, target_dir};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where `bin` and `share` are
    #[arg(long, default_value = "/usr/local")]
    pub(crate) prefix: PathBuf,
    /// A folder to put in front of the prefix, for packagers
    #[arg(long, env = "DESTDIR", default_value = "")]
    pub(crate) destination: PathBuf,
    /// Also under the names of the composefs tools, which then come before Debian's on most paths
    #[arg(long)]
    pub(crate) composefs: bool,
    /// Build without optimization
    #[arg(long, hide = true)]
    pub(crate) debug: bool,
}

const COMPOSEFS: [&str; 4] = ["mkcomposefs", "composefs-info", "composefs-dump", "mount.composefs"];

/// Shell, folder below `share`, and the file's name there.
const COMPLETIONS: [(&str, &str, &str); 3] = [
    ("bash", "bash-completion/completions", "quire"),
    ("zsh", "zsh/site-functions", "_quire"),
    ("fish", "fish/vendor_completions.d", "quire.fish"),
];

const UNITS: [&str; 2] = ["quire-lazy.service", "quire-snapshotter.service"];

pub(crate) fn run(args: &Args) -> Result<()> {
    let prefix = install(args)?;
    println!("installed below {}", prefix.display());
    Ok(())
}

/// Returns where `bin` and `share` are.
pub(crate) fn install(args: &Args) -> Result<PathBuf> {
    let mut cargo = Command::new(env!("CARGO"));
    let (profile, folder) = if args.debug { ("dev", "debug") } else { ("release", "release") };
    cargo.args(["build", "--profile", profile]);
    shown(cargo.current_dir(repository()))?;
    let built = target_dir()?.join(folder).join("quire");
    let prefix = match args.destination.as_os_str().is_empty() {
        true => args.prefix.clone(),
        false => args.destination.join(args.prefix.strip_prefix("/").unwrap_or(&args.prefix)),
    };
    let (bin, share) = (prefix.join("bin"), prefix.join("share"));
    fs::create_dir_all(&bin)?;
    // A running program's file cannot be written, but it can be replaced.
    remove(&bin.join("quire"))?;
    fs::copy(&built, bin.join("quire"))?;
    for name in COMPOSEFS.iter().filter(|_| args.composefs) {
        remove(&bin.join(name))?;
        symlink("quire", bin.join(name))?;
    }
    let pages = share.join("man/man1");
    fs::create_dir_all(&pages)?;
    quiet(Command::new(&built).arg("man").arg(&pages))?;
    for (shell, folder, file) in COMPLETIONS {
        let text = quiet(Command::new(&built).args(["completions", shell]))?;
        fs::create_dir_all(share.join(folder))?;
        fs::write(share.join(folder).join(file), text)?;
    }
    let units = prefix.join("lib/systemd/system");
    fs::create_dir_all(&units)?;
    let program = args.prefix.join("bin/quire").display().to_string();
    for name in UNITS {
        let unit = fs::read_to_string(repository().join("dist/systemd").join(name))?;
        fs::write(units.join(name), unit.replace("/usr/bin/quire", &program))?;
    }
    Ok(prefix)
}
