//! Debian's docker-registry on a free port of loopback, until it is dropped. Tests of other crates and the bench of pulls
//! take this file in, too.

use std::io::{Error, ErrorKind, Result};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The program, as Debian's package of that name has it.
pub(crate) const PROGRAM: &str = "docker-registry";

/// How long it may take to answer, on a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(20);

/// A registry that runs.
#[derive(Debug)]
pub(crate) struct Daemon {
    child: Child,
    /// Its host and port.
    pub(crate) host: String,
    /// Has its settings and what is pushed.
    _folder: tempfile::TempDir,
}

impl Daemon {
    /// Starts one in a folder below `parent`, with `settings` in YAML besides those that it needs. `None` where it is not
    /// installed.
    pub(crate) fn start(parent: &std::path::Path, settings: &str) -> Result<Option<Self>> {
        let folder = tempfile::tempdir_in(parent)?;
        // Free for now; nothing else here takes ports of this range by number.
        let host = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
        let file = folder.path().join("registry.yml");
        let data = folder.path().join("data");
        let text = format!(
            "version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\nstorage: {{filesystem: {{rootdirectory: \
             {}}}, delete: {{enabled: true}}}}\nhttp: {{addr: \"{host}\"}}\n{settings}",
            data.display()
        );
        std::fs::write(&file, text)?;
        let mut command = Command::new(PROGRAM);
        command.arg("serve").arg(&file).stdout(Stdio::null()).stderr(Stdio::null());
        let child = match command.spawn() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            child => child?,
        };
        let daemon = Self { child, host, _folder: folder };
        let since = Instant::now();
        while TcpStream::connect(&daemon.host).is_err() {
            if since.elapsed() > PATIENCE {
                return Err(Error::new(ErrorKind::TimedOut, "docker-registry does not answer"));
            }
            sleep(Duration::from_millis(20));
        }
        Ok(Some(daemon))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // One that has ended by itself needs no ending.
        let _ended = self.child.kill().and_then(|()| self.child.wait());
    }
}
