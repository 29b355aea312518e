//! Boots a machine from an image that Quire has mounted on the host, by virtiofs: nothing is copied, and only the
//! host's page cache is used.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::Each;
use super::boot::{self, Machine};
use super::contents::{self, Contents, OVER_IT};
use super::initramfs::{self, Way};
use super::kernels::Kernel;
use crate::cache::Cache;
use crate::process::{find_program, is_root, need, quiet, target_dir};
use crate::{Failed, Skipped, inputs};

pub(super) const NAME: &str = "virtiofs";
pub(super) const ABOUT: &str = "a mount of the host is the root of a machine";

const MOUNT: &str = r"
mkdir /lower /upper
mount -t virtiofs quire /lower
";

/// Mounts the image `$3` of the store `$2` at `$4`, in a separate mount namespace, and serves it. Both versions of
/// virtiofsd, in C and in Rust, support these options.
const SERVE: &str = r#"
"$1" --store "$2" --quiet mount "$3" "$4"
exec setpriv --pdeathsig KILL "$5" --socket-path="$6" -o source="$4" -o cache=always -o xattr
"#;

/// Paths in distributions: the program is for QEMU, and not in `PATH`. Source: the file lists of Debian's packages
/// qemu-system-common (12) and virtiofsd (13), and of Fedora's virtiofsd.
const PLACES: [&str; 2] = ["/usr/libexec/virtiofsd", "/usr/lib/qemu/virtiofsd"];

/// Time limit until the server listens.
const PATIENCE: Duration = Duration::from_secs(30);

/// A server, which is killed on drop together with its mount.
#[derive(Debug)]
pub struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only if the server has ended.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

impl Server {
    fn start(program: &Path, store: &Path, point: &Path, socket: &Path) -> Result<Self> {
        let quire = target_dir()?.join("debug/quire");
        let mut command = Command::new(need("setpriv")?);
        command.args(["--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private"]);
        command.args(["sh", "-euc", SERVE, "sh"]).arg(quire).arg(store).arg("a").arg(point);
        command.arg(program).arg(socket);
        Self::listen(command, socket)
    }

    /// Returns an error if the program is not installed.
    pub fn check() -> Result<()> {
        program().map(drop)
    }

    /// Serves a directory to one guest, at a new socket.
    pub fn share(directory: &Path, socket: &Path) -> Result<Self> {
        let mut command = Command::new(need("setpriv")?);
        command.args(["--pdeathsig", "KILL"]).arg(program()?);
        command.arg(format!("--socket-path={}", socket.display()));
        command.arg("-o").arg(format!("source={}", directory.display()));
        command.args(["-o", "cache=always", "-o", "xattr"]);
        Self::listen(command, socket)
    }

    fn listen(mut command: Command, socket: &Path) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut server = Self(command.spawn().context("cannot start virtiofsd")?);
        let since = Instant::now();
        // The socket is not connected to, because the server accepts only one client.
        while !socket.exists() {
            if let Some(status) = server.0.try_wait()? {
                bail!(Failed(format!("virtiofsd ended: {status}")));
            }
            if since.elapsed() > PATIENCE {
                bail!(Failed(String::from("virtiofsd does not listen")));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }
}

fn program() -> Result<PathBuf> {
    let found = PLACES.iter().map(PathBuf::from).find(|it| it.is_file());
    let found = found.or_else(|| find_program("virtiofsd"));
    found.context(Skipped(String::from("virtiofsd is not installed (Debian: qemu-system-common)")))
}

/// Mounts a Debian image, boots it, and calls `each` with the result of each step.
pub(super) fn test(cache: &Cache, kernel: &Kernel, each: Each<'_>) -> Result<()> {
    if !is_root() {
        bail!(Skipped(String::from("mounts need root")));
    }
    let program = program()?;
    let layout = inputs::debian_small(cache, false)?;
    let work = super::work(cache)?;
    let at = |name: &str| work.path().join(name);
    let [store, point, socket, initramfs] = ["store", "point", "socket", "initramfs.cpio"].map(at);
    let contents = Contents::from_layout(&layout, work.path())?;
    std::fs::create_dir(&point)?;
    let mut import = super::quire(&store)?;
    quiet(import.args(["--quiet", "import"]).arg(format!("oci:{}", layout.display())).arg("a"))?;
    let (steps, plan) = contents::steps(NAME, "^quire /vm/image virtiofs ");
    let way = Way {
        script: &(MOUNT.to_owned() + OVER_IT),
        programs: &[],
        files: &contents.files(&plan),
        modules: &[],
    };
    initramfs::write(kernel, &need("busybox")?, &way, work.path(), &initramfs)?;
    let _server = Server::start(&program, &store, &point, &socket)?;
    let machine =
        Machine { share: Some(&socket), ..Machine::new(kernel, &initramfs, "-virtiofs")? };
    boot::run(&machine, &steps, each)?;
    Ok(())
}
