//! `cargo xtask newcomer`: what a new user of a release does first, in a fresh minimal Debian: install the package or
//! the tarball, and run README's first commands in an ordinary account. The times are printed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use testing::daemon::{Daemon, PROGRAM};

use rig::cache::Cache;
use rig::process::{is_root, need, quiet, shown};
use rig::{Skipped, inputs};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Directory with the files of a release, as `cargo xtask release` made them
    #[arg(long, value_name = "DIR", default_value = "target/release-files")]
    files: PathBuf,
}

/// Makes the file system of this process the root at $1, which is mounted there.
const ENTER: &str = r#"
    cd "$1"
    mkdir -p old
    for each in proc sys dev run tmp; do mkdir -p $each; done
    mount -t proc proc proc
    mount --rbind /sys sys
    mount --rbind /dev dev
    mount -t tmpfs tmpfs run
    mount -t tmpfs tmpfs tmp
    pivot_root . old
    cd /
    umount -l /old
    exec sh -eu /newcomer "$2"
"#;

/// Installs the file that $1 names, as root, and runs README's commands as an ordinary user. Lists of packages are up
/// to date before, as on a machine in use.
const INSTALL: &str = r#"
    export DEBIAN_FRONTEND=noninteractive LC_ALL=C PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    apt-get update --quiet > /update.log 2>&1 || { tail -3 /update.log; exit 1; }
    useradd --create-home --shell /bin/sh newcomer
    now() { date +%s%3N; }
    began=$(now)
    case $1 in
        *.deb) apt-get install --yes --quiet "/$1" ;;
        *)
            # The tarball's compression needs xz, which a minimal system lacks.
            apt-get install --yes --quiet xz-utils
            tar -xf "/$1"
            ./quire-*/install.sh | tee /installed
            # The user types the command that install.sh prints.
            $(sed -n 's/^to install them: \(.*\)$/\1 --yes/p' /installed)
            ;;
    esac > /install.log 2>&1 || { tail -12 /install.log; exit 1; }
    installed=$(now)
    first=$(su - newcomer -c 'quire run --pull missing debian cat /etc/debian_version')
    ended=$(now)
    [ "$first" = "$(cat /etc/debian_version)" ] || { echo "the container printed: $first"; exit 1; }
    su - newcomer -c '
        set -eu
        quire run --detach --name web debian sleep 1000
        quire exec web id -u
        quire ps
        quire rm --force web
        quire verify
    ' > /session.log 2>&1 || { cat /session.log; exit 1; }
    echo "$((installed - began)) ms to install, $((ended - installed)) ms to the end of the first container" > /times
"#;

pub(crate) fn run(args: &Args) -> Result<()> {
    if !is_root() {
        bail!(Skipped(String::from("a fresh root needs mounts, and so root")));
    }
    let cache = Cache::open()?;
    let packages = packages(&args.files)?;
    let image = inputs::debian_base(&cache)?;
    let registry = Daemon::start(cache.dir(), "").context("cannot start docker-registry")?;
    let registry = registry.ok_or_else(|| Skipped(format!("{PROGRAM} is not installed")))?;
    let mut skopeo = Command::new(need("skopeo")?);
    skopeo.args(["copy", "--quiet", "--dest-tls-verify=false"]);
    skopeo.arg(format!("oci:{}:latest", image.display()));
    quiet(skopeo.arg(format!("docker://{}/library/debian:latest", registry.host)))?;
    for package in packages {
        let name = package.file_name().context("a file has a name")?.to_string_lossy();
        let times = install(&cache, &package, &registry.host)?;
        println!("{name}: {times} (aim: 60,000 ms in all)");
    }
    Ok(())
}

/// Finds the package and the tarball for this machine.
fn packages(files: &Path) -> Result<Vec<PathBuf>> {
    let (debian, machine) =
        if cfg!(target_arch = "aarch64") { ("arm64", "aarch64") } else { ("amd64", "x86_64") };
    let ends = [format!("_{debian}.deb"), format!("-{machine}-linux.tar.xz")];
    let entries = fs::read_dir(files)
        .with_context(|| format!("no release in {}: cargo xtask release", files.display()))?;
    let mut found = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if ends.iter().any(|it| path.to_string_lossy().ends_with(it)) {
            found.push(path);
        }
    }
    found.sort();
    if found.len() != ends.len() {
        bail!("{} has {} of 2 files for this machine", files.display(), found.len());
    }
    Ok(found)
}

/// Installs a file in a fresh root, and returns its times. The root is removed.
fn install(cache: &Cache, package: &Path, registry: &str) -> Result<String> {
    let lower = inputs::base_root(cache)?;
    let work = tempfile::tempdir_in(cache.dir())?;
    let upper = work.path().join("upper");
    for name in ["upper", "work", "root"] {
        fs::create_dir(work.path().join(name))?;
    }
    let name = package.file_name().context("a file has a name")?;
    fs::copy(package, upper.join(name))?;
    fs::write(upper.join("newcomer"), INSTALL)?;
    // A pull of `debian` would reach Docker Hub.
    let hosts = upper.join("etc/quire/certs.d/docker.io");
    fs::create_dir_all(&hosts)?;
    fs::write(hosts.join("hosts.toml"), format!("[host.\"http://{registry}\"]\n"))?;
    // Names are resolved, and proxies are used, as on the host.
    for name in ["etc/resolv.conf", "etc/hosts"] {
        fs::copy(Path::new("/").join(name), upper.join(name))?;
    }
    let settings = upper.join("etc/apt/apt.conf.d");
    fs::create_dir_all(&settings)?;
    // Hosts without apt have none.
    for entry in fs::read_dir("/etc/apt/apt.conf.d").into_iter().flatten() {
        let entry = entry?;
        fs::copy(entry.path(), settings.join(entry.file_name()))?;
    }
    let script = format!(
        "mount -t overlay -o lowerdir={},upperdir={1}/upper,workdir={1}/work overlay {1}/root\n{ENTER}",
        lower.display(),
        work.path().display(),
    );
    // The mounts end with their namespace.
    let mut unshare = Command::new(need("unshare")?);
    unshare.args(["--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]);
    unshare.args(["sh", "-euc", &script, "sh"]).arg(work.path().join("root")).arg(name);
    unshare.stdin(Stdio::null());
    shown(&mut unshare)?;
    Ok(fs::read_to_string(upper.join("times"))?.trim().to_owned())
}
