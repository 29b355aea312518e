//! Registries on free ports of the loopback address, which run until they are dropped: Debian's docker-registry, or
//! any other program.

use std::io::{Error, ErrorKind, Result};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Name of docker-registry's program in Debian's package of that name.
pub const PROGRAM: &str = "docker-registry";

/// Timeout for the start of a registry, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A running registry.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    /// Host and port.
    pub host: String,
    /// Contains the registry's settings and the pushed data.
    folder: tempfile::TempDir,
}

impl Daemon {
    /// Starts docker-registry in a folder below `parent`, with additional `settings` in YAML. `None` if it is not
    /// installed.
    pub fn start(parent: &Path, settings: &str) -> Result<Option<Self>> {
        Self::serve(parent, |folder, host| {
            let file = folder.join("registry.yml");
            let data = folder.join("data");
            let text = format!(
                "version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\nstorage: {{filesystem: \
                 {{rootdirectory: {}}}, delete: {{enabled: true}}}}\nhttp: {{addr: \"{host}\"}}\n{settings}",
                data.display()
            );
            std::fs::write(&file, text)?;
            let mut command = Command::new(PROGRAM);
            command.arg("serve").arg(&file);
            Ok(command)
        })
    }

    /// Starts the registry of `command`, which gets a new folder and the address to listen at. `None` if the program
    /// does not exist.
    pub fn serve(
        parent: &Path,
        command: impl FnOnce(&Path, &SocketAddr) -> Result<Command>,
    ) -> Result<Option<Self>> {
        let folder = tempfile::tempdir_in(parent)?;
        // The port is free now, and no other part of the tests takes ports of this range by number.
        let host = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let mut command = command(folder.path(), &host)?;
        let child = match command.stdout(Stdio::null()).stderr(Stdio::null()).spawn() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            child => child?,
        };
        let daemon = Self { child, host: host.to_string(), folder };
        let since = Instant::now();
        while TcpStream::connect(&daemon.host).is_err() {
            if since.elapsed() > PATIENCE {
                return Err(Error::new(ErrorKind::TimedOut, "the registry does not answer"));
            }
            sleep(Duration::from_millis(20));
        }
        Ok(Some(daemon))
    }

    /// Returns the pid of the registry.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Returns the folder with the settings, and for docker-registry the pushed data in `data`.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // A registry that has already exited need not be killed.
        let _ended = self.child.kill().and_then(|()| self.child.wait());
    }
}
