//! Cache of compiled seccomp filters in the kernel's format, kept until the next boot.
//!
//! crun has libseccomp compile the filter of each container again, which takes longer than all its other work. crun
//! keeps the result in its state folder as `ID/seccomp.bpf` while the container exists. crun also accepts a compiled
//! filter, as base64 in the annotation `run.oci.seccomp_bpf_data`. Source: crun 1.8.1, `src/libcrun/seccomp.c`,
//! `libcrun_generate_seccomp`.
//!
//! Quire keeps crun's result and reuses it for the same filter, as long as the program and the library are the same.

use std::fs::{File, Metadata};
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use store::Digest;

use crate::backoff::Pace;
use crate::boot_cache::Notes;
use crate::bundle::spec::RuntimeSpec;
use crate::runtime::{Kind, Runtime};

const ANNOTATION: &str = "run.oci.seccomp_bpf_data";

/// Size of an instruction, in bytes. Source: `linux/filter.h`, `struct sock_filter`.
const INSTRUCTION: usize = 8;

/// Size of the longest filter, in bytes. Source: `linux/bpf_common.h`, `BPF_MAXINSNS`.
const FILTER_MAX: usize = 4096 * INSTRUCTION;

/// Initial interval between checks for crun's file, which exists for the container's whole life.
const LOOK: Duration = Duration::from_micros(300);

/// How long a thread still waits for crun's filter after crun has written its pid file.
const PATIENCE: Duration = Duration::from_secs(3);

/// File name of the library that compiles filters, unless crun contains it. If the loader finds the library outside
/// of `FOLDERS`, its path is in the loader's cache. Source: ld.so(8).
const LIBRARY: &str = "libseccomp.so.2";
const FOLDERS: [&str; 5] = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib"];
const LOADER_CACHE: &str = "/etc/ld.so.cache";

/// The seccomp filter of a container that is about to start.
#[derive(Debug)]
pub(crate) enum Compiled {
    /// A compiled filter in the kernel's format.
    Known(Vec<u8>),
    /// The compiled filter is not known yet. This start can store it.
    Unknown(Lesson),
}

/// Path where crun writes a compiled filter, and the note in which the filter is kept.
#[derive(Debug)]
pub(crate) struct Lesson {
    made: PathBuf,
    notes: Notes,
    name: String,
}

impl Compiled {
    /// Looks up the filter of a container with this configuration. `made` is the path of the filter in the runtime's
    /// state folder, and `notes` hold the filters of earlier starts. Returns `None` if the container has no filter, or
    /// if the runtime accepts no compiled filter.
    pub(crate) fn lookup(
        runtime: &Runtime,
        spec: &RuntimeSpec,
        made: PathBuf,
        notes: Option<&Notes>,
    ) -> Option<Self> {
        let filter = spec.linux.seccomp.as_ref()?;
        if runtime.kind != Kind::Crun {
            return None;
        }
        let program = std::fs::metadata(&runtime.path).ok()?;
        let (notes, name) = (notes?.clone(), name(filter, &program, &libraries()));
        match read(&notes, &name) {
            Ok(filter) => Some(Self::Known(filter)),
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::debug!(name, %error, "compiling the filter again");
                }
                Some(Self::Unknown(Lesson { made, notes, name }))
            }
        }
    }

    /// Adds the filter to a configuration.
    pub(crate) fn annotate(filter: &[u8], spec: &mut RuntimeSpec) {
        spec.annotations.insert(ANNOTATION.to_owned(), STANDARD.encode(filter));
    }
}

/// Returns the name of a note: a digest of everything that the compiled filter depends on.
fn name(filter: &Value, program: &Metadata, libraries: &[PathBuf]) -> String {
    let libraries = libraries.iter().map(|it| std::fs::metadata(it).ok());
    let files: Vec<_> = [Some(program.clone())].into_iter().chain(libraries).collect();
    let identity = |it: &Metadata| (it.dev(), it.ino(), it.size(), it.mtime(), it.mtime_nsec());
    let files: Vec<_> = files.iter().map(|it| it.as_ref().map(identity)).collect();
    let all = format!("{files:?} {filter}");
    format!("filter-{}", Digest::sha256(all.as_bytes()).to_string().replace(':', "-"))
}

/// Returns paths that identify the library: if the loader takes another library, one of these paths has another file.
fn libraries() -> Vec<PathBuf> {
    let own = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let folders = FOLDERS.into_iter().chain([own.as_str()]);
    folders.map(|it| Path::new(it).join(LIBRARY)).chain([LOADER_CACHE.into()]).collect()
}

fn read(notes: &Notes, name: &str) -> io::Result<Vec<u8>> {
    let filter = notes.read(name, FILTER_MAX)?;
    match is_filter(&filter) {
        true => Ok(filter),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a filter")),
    }
}

/// Whether this is a complete program, whose last instruction is a return.
fn is_filter(bytes: &[u8]) -> bool {
    // Source: `linux/bpf_common.h`, `BPF_RET | BPF_K`, in both byte orders.
    const RETURN: [[u8; 2]; 2] = [[0x06, 0], [0, 0x06]];
    let (instructions, rest) = bytes.as_chunks::<INSTRUCTION>();
    let returns = |it: &[u8; INSTRUCTION]| RETURN.contains(&[it[0], it[1]]);
    rest.is_empty() && bytes.len() <= FILTER_MAX && instructions.last().is_some_and(returns)
}

impl Lesson {
    /// Notes the filter of a running container.
    pub(crate) fn learn(&self) {
        if let Err(error) = File::open(&self.made).and_then(|made| self.note(made)) {
            tracing::debug!(made = %self.made.display(), %error, "cannot store the filter");
        }
    }

    fn note(&self, made: File) -> io::Result<()> {
        let mut filter = Vec::new();
        made.take(FILTER_MAX as u64 + 1).read_to_end(&mut filter)?;
        if !is_filter(&filter) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a filter"));
        }
        self.notes.write(&self.name, &filter)
    }

    /// Waits for crun's file in a thread, because the container may end, and remove the file, before Quire learns
    /// that it has started. The thread does not wait much longer than for `pid`, the file that crun writes after the
    /// filter.
    pub(crate) fn wait(self, pid: &Path) -> Waiting {
        let is_over = std::sync::Arc::new(AtomicBool::new(false));
        let over = std::sync::Arc::clone(&is_over);
        let (made, pid) = (self.made.clone(), pid.to_owned());
        let look = move || look(&made, &pid, PATIENCE, &over);
        let thread = std::thread::Builder::new().stack_size(128 << 10).spawn(look).ok();
        Waiting { lesson: self, is_over, thread }
    }
}

/// Waits for the file `made` and opens it. Gives up when the time `patience` has passed since `pid` was found, or when
/// `is_over` is set.
fn look(made: &Path, pid: &Path, patience: Duration, is_over: &AtomicBool) -> Option<File> {
    let pace = Pace::new(LOOK);
    let mut since = None;
    while !is_over.load(Ordering::Relaxed) {
        if let Ok(file) = File::open(made) {
            return Some(file);
        }
        if pid.exists() && since.get_or_insert_with(Instant::now).elapsed() >= patience {
            break;
        }
        // `Waiting::stop` wakes this thread.
        std::thread::park_timeout(pace.pause());
    }
    None
}

/// A thread that waits for a filter.
#[derive(Debug)]
pub(crate) struct Waiting {
    lesson: Lesson,
    is_over: std::sync::Arc<AtomicBool>,
    thread: Option<JoinHandle<Option<File>>>,
}

impl Waiting {
    /// Stops waiting after the container's end. If the container has `started`, its filter is complete and is kept.
    pub(crate) fn finish(mut self, started: bool) {
        let made = self.stop().filter(|_| started);
        if let Some(Err(error)) = made.map(|made| self.lesson.note(made)) {
            tracing::debug!(%error, "cannot store the filter");
        }
    }

    fn stop(&mut self) -> Option<File> {
        self.is_over.store(true, Ordering::Relaxed);
        let thread = self.thread.take()?;
        thread.thread().unpark();
        thread.join().ok().flatten()
    }
}

impl Drop for Waiting {
    /// Stops the thread if the container could not be started.
    fn drop(&mut self) {
        drop(self.stop());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A filter of one instruction, which returns `SECCOMP_RET_ALLOW`.
    const ALLOW: [u8; 8] = [0x06, 0, 0, 0, 0, 0, 0xff, 0x7f];

    fn notes_in(folder: &Path) -> Notes {
        Notes::new(folder, rustix::process::geteuid().as_raw())
    }

    fn lesson(folder: &Path) -> Lesson {
        let (made, notes) = (folder.join("seccomp.bpf"), notes_in(&folder.join("notes")));
        Lesson { made, notes, name: "filter-x".to_owned() }
    }

    #[test]
    fn what_is_no_filter_is_neither_kept_nor_taken() {
        let folder = tempfile::tempdir().unwrap();
        let lesson = lesson(folder.path());
        let read = || read(&lesson.notes, &lesson.name);
        lesson.learn();
        let long = ALLOW.repeat(4097);
        for bytes in [&b""[..], &ALLOW[..7], &[0; 8], &[ALLOW, [0; 8]].concat(), &long] {
            std::fs::write(&lesson.made, bytes).unwrap();
            lesson.learn();
            assert_eq!(read().unwrap_err().kind(), io::ErrorKind::NotFound, "{}", bytes.len());
        }
        std::fs::write(&lesson.made, ALLOW).unwrap();
        lesson.learn();
        assert_eq!(read().unwrap(), ALLOW);
        lesson.notes.write(&lesson.name, &ALLOW[..7]).unwrap();
        assert_eq!(read().unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_container_that_is_gone_leaves_its_filter() {
        let folder = tempfile::tempdir().unwrap();
        let lesson = lesson(folder.path());
        let made = lesson.made.clone();
        let (notes, pid) = (notes_in(&folder.path().join("notes")), folder.path().join("pid"));
        let waiting = lesson.wait(&pid);
        std::fs::write(&made, ALLOW).unwrap();
        while waiting.thread.as_ref().is_some_and(|it| !it.is_finished()) {
            std::thread::yield_now();
        }
        std::fs::remove_file(&made).unwrap();
        waiting.finish(true);
        assert_eq!(read(&notes, "filter-x").unwrap(), ALLOW);
        let other = "filter-y".to_owned();
        let waiting = Lesson { made, notes: notes.clone(), name: other.clone() }.wait(&pid);
        waiting.finish(false);
        assert_eq!(read(&notes, &other).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    /// Tests a crun that does not write the filter to a file, or writes it elsewhere.
    #[test]
    fn a_filter_that_does_not_come_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let (made, pid) = (folder.path().join("seccomp.bpf"), folder.path().join("pid"));
        std::fs::write(&pid, "1").unwrap();
        let look = || look(&made, &pid, Duration::ZERO, &AtomicBool::new(false));
        assert!(look().is_none());
        std::fs::write(&made, ALLOW).unwrap();
        assert!(look().is_some());
    }

    #[test]
    fn another_filter_or_program_has_another_note() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("crun");
        std::fs::write(&program, "one").unwrap();
        let one = std::fs::metadata(&program).unwrap();
        let filters = [
            json!({"defaultAction": "SCMP_ACT_ERRNO"}),
            json!({"defaultAction": "SCMP_ACT_ALLOW"}),
        ];
        let library = folder.path().join(LIBRARY);
        let name = |filter: usize, program| {
            super::name(&filters[filter], program, std::slice::from_ref(&library))
        };
        let bare = name(0, &one);
        assert_ne!(bare, name(1, &one));
        std::fs::write(&library, "one").unwrap();
        let with_library = name(0, &one);
        assert_ne!(with_library, bare);
        std::fs::write(&library, "other").unwrap();
        assert_ne!(with_library, name(0, &one));
        std::fs::write(&program, "other").unwrap();
        let other = std::fs::metadata(&program).unwrap();
        assert_ne!(name(0, &one), name(0, &other));
        let runtime = Runtime { path: program, kind: Kind::Runc };
        let mut spec = RuntimeSpec::default();
        spec.linux.seccomp = Some(filters[0].clone());
        let notes = notes_in(folder.path());
        let of = |runtime, spec| Compiled::lookup(runtime, spec, PathBuf::new(), Some(&notes));
        assert!(of(&runtime, &spec).is_none(), "runc takes none");
        let runtime = Runtime { kind: Kind::Crun, ..runtime.clone() };
        assert!(matches!(of(&runtime, &spec), Some(Compiled::Unknown(_))));
        assert!(of(&runtime, &RuntimeSpec::default()).is_none(), "nothing is filtered");
    }
}
