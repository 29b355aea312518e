//! Finds the processes that hold a lock of a file.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::process::Pid;

use super::{Process, parent_of};

/// A process that holds a lock.
#[derive(Debug)]
pub struct Holder {
    pub process: Process,
    pub parent: Option<Pid>,
}

/// Returns the processes that hold a flock(2) lock of a file, except this one and those that this process may not
/// inspect. A descriptor of the file without a lock does not count. Source: proc_pid_fdinfo(5), `lock:`.
pub fn holders(file: BorrowedFd<'_>) -> Result<Vec<Holder>, Errno> {
    let wanted = rustix::fs::fstat(file)?;
    let is_it =
        |stat: &rustix::fs::Stat| (stat.st_dev, stat.st_ino) == (wanted.st_dev, wanted.st_ino);
    let all =
        std::fs::read_dir("/proc").map_err(|it| Errno::from_io_error(&it).unwrap_or(Errno::IO))?;
    let pids = all.flatten().filter_map(|it| it.file_name().to_str()?.parse().ok());
    let own = rustix::process::getpid();
    let mut found = Vec::new();
    for pid in pids.filter_map(Pid::from_raw).filter(|it| *it != own) {
        // The process is opened before it is inspected, so that its pid cannot be reused in between.
        let Ok(process) = Process::open(pid) else { continue };
        let folder = format!("/proc/{}", pid.as_raw_nonzero());
        // The process has exited or belongs to another user.
        let Ok(descriptors) = std::fs::read_dir(format!("{folder}/fd")) else { continue };
        let holds = descriptors.flatten().any(|it| {
            let name = it.file_name();
            let info = std::fs::read_to_string(format!("{folder}/fdinfo/{}", name.display()));
            // stat runs only after a match, because for other files it may block, as on an unreachable server.
            info.is_ok_and(|info| info.lines().any(|line| has_lock(line, wanted.st_ino)))
                && rustix::fs::stat(it.path()).is_ok_and(|stat| is_it(&stat))
        });
        if holds {
            found.push(Holder { process, parent: parent_of(pid) });
        }
    }
    Ok(found)
}

/// Whether a line of fdinfo reports a flock lock of a file with this inode number. The device number in the line is
/// ignored, because it is not always that of stat(2).
fn has_lock(line: &str, inode: u64) -> bool {
    let Some(rest) = line.strip_prefix("lock:") else { return false };
    let mut words = rest.split_whitespace();
    let is_flock = words.nth(1) == Some("FLOCK");
    let file = words.find(|it| it.split(':').count() == 3);
    is_flock && file.and_then(|it| it.rsplit(':').next()?.parse().ok()) == Some(inode)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn only_who_holds_the_lock_is_found() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let found = || {
            let holders = holders(file.as_file().as_fd()).unwrap();
            holders.iter().map(|it| it.process.pid()).collect::<Vec<_>>()
        };
        let start = |script: &str| {
            let mut shell = Command::new("sh");
            shell.arg("-c").arg(format!("exec 5<\"$0\"; {script} echo ready; read end"));
            shell.arg(file.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = shell.spawn().unwrap();
            let mut line = String::new();
            let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
            std::io::BufRead::read_line(&mut output, &mut line).unwrap();
            assert_eq!(line, "ready\n");
            child
        };
        let mut reader = start("");
        assert_eq!(found(), []);
        let mut holder = start("flock -x 5;");
        assert_eq!(found(), [Pid::from_child(&holder)]);
        for child in [&mut reader, &mut holder] {
            drop(child.stdin.take());
            child.wait().unwrap();
        }
        assert_eq!(found(), []);
    }
}
