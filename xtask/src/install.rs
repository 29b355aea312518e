//! `make install`: the binary, the names it has as a composefs tool, man pages, completions and units for systemd.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use rig::cache::remove;
use rig::process::{quiet, repository, shown, target_dir};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    layout: Layout,
    /// Build without optimization
    #[arg(long, hide = true)]
    debug: bool,
}

/// Where files go, and which.
#[derive(Debug, clap::Args)]
pub(crate) struct Layout {
    /// Where `bin` and `share` are
    #[arg(long, default_value = "/usr/local")]
    pub(crate) prefix: PathBuf,
    /// A folder to put in front of the prefix, for packagers
    #[arg(long, env = "DESTDIR", default_value = "")]
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
    let prefix = lay(&build(args.debug)?, &args.layout)?;
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
