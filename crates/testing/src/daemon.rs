//! Registries on free ports of loopback, until they are dropped: Debian's docker-registry, and any other that is a program.

use std::io::{Error, ErrorKind, Result};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The program of the first, as Debian's package of that name has it.
pub const PROGRAM: &str = "docker-registry";

/// How long it may take to answer, on a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(120);

/// A registry that runs.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    /// Its host and port.
    pub host: String,
    /// Has its settings and what is pushed.
    folder: tempfile::TempDir,
}

impl Daemon {
    /// Starts one in a folder below `parent`, with `settings` in YAML besides those that it needs. `None` where it is not
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

    /// Starts the registry that `command` says, given a folder of its own and the address where it has to listen. `None`
    /// where there is no such program.
    pub fn serve(
        parent: &Path,
        command: impl FnOnce(&Path, &SocketAddr) -> Result<Command>,
    ) -> Result<Option<Self>> {
        let folder = tempfile::tempdir_in(parent)?;
        // Free for now; nothing else here takes ports of this range by number.
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

    /// The number of its process.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Has its settings, and in `data` what is pushed to Debian's.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // One that has ended by itself needs no ending.
        let _ended = self.child.kill().and_then(|()| self.child.wait());
    }
}
