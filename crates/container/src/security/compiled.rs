//! The seccomp filter as the kernel takes it, compiled once for each start of the machine.
//!
//! crun has libseccomp compile the filter of each container anew, which takes longer than all else that it does. It keeps
//! the result in its state folder as `ID/seccomp.bpf` while the container is there, and takes one that is ready from the
//! annotation `run.oci.seccomp_bpf_data`, in base64. Source: crun 1.8.1, `src/libcrun/seccomp.c`,
//! `libcrun_generate_seccomp`.
//!
//! What is kept is crun's own result for the very same filter, made by the very same program.

use std::fs::{DirBuilder, DirEntry, File, Metadata, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustix::fs::OFlags;
use serde_json::Value;
use store::Digest;

use crate::runtime::{Kind, Runtime};

const ANNOTATION: &str = "run.oci.seccomp_bpf_data";

/// Bytes of an instruction. Source: `linux/filter.h`, `struct sock_filter`.
const INSTRUCTION: usize = 8;

/// Bytes of the longest filter. Source: `linux/bpf_common.h`, `BPF_MAXINSNS`.
const FILTER_MAX: usize = 4096 * INSTRUCTION;

/// Most hosts need one or two. Each takes 10 kB of memory, and whoever asks for other rights each time needs no more.
const NOTES_MAX: usize = 64;

/// How often it is looked whether crun has made its file: it is there for all of a container's life.
const LOOK: Duration = Duration::from_micros(300);

/// The filter of a container that is about to start.
#[derive(Debug)]
pub(crate) enum Compiled {
    /// As the kernel takes it.
    Known(Vec<u8>),
    /// What is to be learned from this start.
    Unknown(Lesson),
}

/// Where a filter will be, and where it is to be noted.
#[derive(Debug)]
pub(crate) struct Lesson {
    made: PathBuf,
    note: PathBuf,
}

impl Compiled {
    /// For a container with this configuration, whose runtime has this state folder; none if there is no filter, or the runtime
    /// takes none that is ready. In `notes` is what was learned before.
    pub(crate) fn of(
        runtime: &Runtime,
        config: &Value,
        made: PathBuf,
        notes: Option<&Path>,
    ) -> Option<Self> {
        let filter = config["linux"].get("seccomp").filter(|it| it.is_object())?;
        if runtime.kind != Kind::Crun {
            return None;
        }
        let program = std::fs::metadata(&runtime.path).ok()?;
        let note = notes?.join(name(filter, &program));
        match read(&note) {
            Ok(filter) => Some(Self::Known(filter)),
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::debug!(note = %note.display(), %error, "the filter is compiled again");
                }
                Some(Self::Unknown(Lesson { made, note }))
            }
        }
    }

    /// Adds the filter to a configuration.
    pub(crate) fn annotate(filter: &[u8], config: &mut Value) {
        if let Some(config) = config.as_object_mut() {
            let annotations = config
                .entry("annotations")
                .or_insert_with(|| Value::Object([].into_iter().collect()));
            annotations[ANNOTATION] = STANDARD.encode(filter).into();
        }
    }
}

/// All that the result depends on.
fn name(filter: &Value, program: &Metadata) -> String {
    let (device, inode, size) = (program.dev(), program.ino(), program.size());
    let (seconds, part) = (program.mtime(), program.mtime_nsec());
    let all = format!("{device} {inode} {size} {seconds} {part} {filter}");
    format!("filter-{}", Digest::sha256(all.as_bytes()).to_string().replace(':', "-"))
}

/// A note: the filter, and before it the digest of that.
fn read(note: &Path) -> io::Result<Vec<u8>> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).unwrap_or_default();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(note)?;
    let found = file.metadata()?;
    let is_ours = found.uid() == rustix::process::geteuid().as_raw() && found.mode() & 0o22 == 0;
    let odd = |what| io::Error::new(io::ErrorKind::InvalidData, what);
    if !found.is_file() || !is_ours {
        return Err(odd("it is not a file that only this user can write"));
    }
    let mut bytes = Vec::new();
    file.take(FILTER_MAX as u64 + 128).read_to_end(&mut bytes)?;
    let end = bytes.iter().position(|it| *it == b'\n').ok_or_else(|| odd("it has no digest"))?;
    let filter = bytes.split_off(end + 1);
    if bytes[..end] != *Digest::sha256(&filter).to_string().as_bytes() || !is_filter(&filter) {
        return Err(odd("it is not as it was written"));
    }
    Ok(filter)
}

/// Whether this is a whole program: its last instruction returns.
fn is_filter(bytes: &[u8]) -> bool {
    // Source: `linux/bpf_common.h`, `BPF_RET | BPF_K`; in the byte order of this machine, whichever that is.
    const RETURN: [[u8; 2]; 2] = [[0x06, 0], [0, 0x06]];
    let (instructions, rest) = bytes.as_chunks::<INSTRUCTION>();
    let returns = |it: &[u8; INSTRUCTION]| RETURN.contains(&[it[0], it[1]]);
    rest.is_empty() && bytes.len() <= FILTER_MAX && instructions.last().is_some_and(returns)
}

impl Lesson {
    /// Notes the filter of a container that runs.
    pub(crate) fn learn(&self) {
        if let Err(error) = File::open(&self.made).and_then(|made| self.note(made)) {
            tracing::debug!(made = %self.made.display(), %error, "the filter is not kept");
        }
    }

    #[expect(clippy::disallowed_methods, reason = "it is gone with the next start of the machine")]
    fn note(&self, made: File) -> io::Result<()> {
        let mut filter = Vec::new();
        made.take(FILTER_MAX as u64 + 1).read_to_end(&mut filter)?;
        if !is_filter(&filter) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no filter"));
        }
        if let Some(folder) = self.note.parent() {
            DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
            let is_filter = |it: &io::Result<DirEntry>| {
                it.as_ref()
                    .is_ok_and(|it| it.file_name().as_encoded_bytes().starts_with(b"filter-"))
            };
            if std::fs::read_dir(folder)?.filter(is_filter).count() >= NOTES_MAX {
                return Err(io::Error::other("there are many already"));
            }
        }
        let new = self.note.with_extension(std::process::id().to_string());
        let written = || -> io::Result<()> {
            let mut file =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
            writeln!(file, "{}", Digest::sha256(&filter))?;
            file.write_all(&filter)?;
            std::fs::rename(&new, &self.note)
        };
        written().inspect_err(|_| drop(std::fs::remove_file(&new)))
    }

    /// Waits for the file in a thread: the container may have ended, and the file with it, before anybody hears that it runs.
    pub(crate) fn wait(self) -> Waiting {
        let is_over = std::sync::Arc::new(AtomicBool::new(false));
        let over = std::sync::Arc::clone(&is_over);
        let made = self.made.clone();
        let look = move || {
            while !over.load(Ordering::Relaxed) {
                if let Ok(file) = File::open(&made) {
                    return Some(file);
                }
                std::thread::sleep(LOOK);
            }
            None
        };
        let thread = std::thread::Builder::new().stack_size(128 << 10).spawn(look).ok();
        Waiting { lesson: self, is_over, thread }
    }
}

/// Somebody waits for a filter.
#[derive(Debug)]
pub(crate) struct Waiting {
    lesson: Lesson,
    is_over: std::sync::Arc<AtomicBool>,
    thread: Option<JoinHandle<Option<File>>>,
}

impl Waiting {
    /// The container has ended: what it had is complete, if it has `started`.
    pub(crate) fn finish(mut self, started: bool) {
        let made = self.stop().filter(|_| started);
        if let Some(Err(error)) = made.map(|made| self.lesson.note(made)) {
            tracing::debug!(%error, "the filter is not kept");
        }
    }

    fn stop(&mut self) -> Option<File> {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.take().and_then(|it| it.join().ok()).flatten()
    }
}

impl Drop for Waiting {
    /// Also when the container could not be started: nobody looks for ever.
    fn drop(&mut self) {
        drop(self.stop());
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use serde_json::json;

    use super::*;

    /// "return allow": one instruction.
    const ALLOW: [u8; 8] = [0x06, 0, 0, 0, 0, 0, 0xff, 0x7f];

    fn lesson(folder: &Path) -> Lesson {
        Lesson { made: folder.join("seccomp.bpf"), note: folder.join("notes/filter-x") }
    }

    #[test]
    fn only_what_was_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let lesson = lesson(folder.path());
        lesson.learn();
        assert_eq!(read(&lesson.note).unwrap_err().kind(), io::ErrorKind::NotFound);
        std::fs::write(&lesson.made, ALLOW).unwrap();
        lesson.learn();
        assert_eq!(read(&lesson.note).unwrap(), ALLOW);
        let good = std::fs::read(&lesson.note).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            std::fs::write(&lesson.note, bad).unwrap();
            assert!(read(&lesson.note).is_err(), "byte {at}");
        }
        for end in 0..good.len() {
            std::fs::write(&lesson.note, &good[..end]).unwrap();
            assert!(read(&lesson.note).is_err(), "{end} bytes");
        }
        std::fs::write(&lesson.note, &good).unwrap();
        let mode =
            |bits| std::fs::set_permissions(&lesson.note, std::fs::Permissions::from_mode(bits));
        mode(0o666).unwrap();
        assert!(read(&lesson.note).is_err(), "others can write it");
        mode(0o600).unwrap();
        assert!(read(&lesson.note).is_ok());
        let aside = folder.path().join("aside");
        std::fs::copy(&lesson.note, &aside).unwrap();
        std::fs::remove_file(&lesson.note).unwrap();
        symlink(&aside, &lesson.note).unwrap();
        assert!(read(&lesson.note).is_err(), "a link");
    }

    #[test]
    fn what_is_no_filter_is_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        let lesson = lesson(folder.path());
        let long = ALLOW.repeat(4097);
        for bytes in [&b""[..], &ALLOW[..7], &[0; 8], &[ALLOW, [0; 8]].concat(), &long] {
            std::fs::write(&lesson.made, bytes).unwrap();
            lesson.learn();
            assert!(!lesson.note.exists(), "{} bytes", bytes.len());
        }
    }

    #[test]
    fn there_are_not_many_notes() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("seccomp.bpf"), ALLOW).unwrap();
        let of = |number: usize| Lesson {
            made: folder.path().join("seccomp.bpf"),
            note: folder.path().join(format!("notes/filter-{number}")),
        };
        (0..NOTES_MAX + 3).for_each(|it| of(it).learn());
        let kept = (0..NOTES_MAX + 3).filter(|it| of(*it).note.exists()).count();
        assert_eq!(kept, NOTES_MAX);
    }

    #[test]
    fn a_container_that_is_gone_leaves_its_filter() {
        let folder = tempfile::tempdir().unwrap();
        let lesson = lesson(folder.path());
        let (made, note) = (lesson.made.clone(), lesson.note.clone());
        let waiting = lesson.wait();
        std::fs::write(&made, ALLOW).unwrap();
        while waiting.thread.as_ref().is_some_and(|it| !it.is_finished()) {
            std::thread::yield_now();
        }
        std::fs::remove_file(&made).unwrap();
        waiting.finish(true);
        assert_eq!(read(&note).unwrap(), ALLOW);
        let lesson = Lesson { made, note: folder.path().join("other") };
        let waiting = lesson.wait();
        waiting.finish(false);
        assert!(!folder.path().join("other").exists());
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
        assert_ne!(name(&filters[0], &one), name(&filters[1], &one));
        std::fs::write(&program, "other").unwrap();
        let other = std::fs::metadata(&program).unwrap();
        assert_ne!(name(&filters[0], &one), name(&filters[0], &other));
        let runtime = Runtime { path: program, kind: Kind::Runc };
        let config = json!({"linux": {"seccomp": filters[0]}});
        let of =
            |runtime, config| Compiled::of(runtime, config, PathBuf::new(), Some(folder.path()));
        assert!(of(&runtime, &config).is_none(), "runc takes none");
        let runtime = Runtime { kind: Kind::Crun, ..runtime.clone() };
        assert!(matches!(of(&runtime, &config), Some(Compiled::Unknown(_))));
        assert!(of(&runtime, &json!({"linux": {}})).is_none(), "nothing is filtered");
    }
}
