//! Sparse files: their holes are not read, and a signal ends every verb that works on a large file.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::{Place, Ran, is_root};

const TIB: u64 = 1 << 40;

/// Makes a file of `size` bytes that is a hole except for a letter in the middle.
fn sparse(path: &Path, size: u64) {
    let mut file = File::create(path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"x", size / 2).unwrap();
    file.set_len(size).unwrap();
    file.flush().unwrap();
}

/// Makes a tar of one file of `size` zeros, of which only the header takes disk space.
fn sparse_tar(path: &Path, size: u64) -> u64 {
    let mut header = [0; 512];
    header[..4].copy_from_slice(b"file");
    header[100..107].copy_from_slice(b"0000644");
    header[124] = 0x80;
    header[128..136].copy_from_slice(&size.to_be_bytes());
    header[156] = b'0';
    header[257..265].copy_from_slice(b"ustar\x0000");
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().copied().map(u32::from).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut file = File::create(path).unwrap();
    file.write_all(&header).unwrap();
    let length = 512 + size.next_multiple_of(512) + 1024;
    file.set_len(length).unwrap();
    length
}

/// Starts a command, interrupts it while it works, and checks that it ends soon.
#[track_caller]
fn interrupted(mut command: Command, signal: Signal) {
    let shown = format!("{command:?}");
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = child.spawn().unwrap();
    std::thread::sleep(Duration::from_millis(700));
    assert!(child.try_wait().unwrap().is_none(), "{shown} was over before the signal");
    let start = Instant::now();
    kill_process(Pid::from_child(&child), signal).unwrap();
    let ended = child.wait_with_output().unwrap();
    let took = start.elapsed();
    let text = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(2), "{shown}: {text}");
    assert!(text.contains("cancelled"), "{shown}: {text}");
    // This usually takes a tenth of a second. The limit is larger because the machine may be busy.
    assert!(took < Duration::from_secs(3), "{shown} took {took:?}");
}

#[test]
fn holes_are_not_read_and_signals_end_every_source() {
    let place = Place::new();
    std::fs::create_dir(place.path("tree")).unwrap();
    sparse(&place.path("tree/lastlog"), TIB);
    let start = Instant::now();
    place.out("import --quiet --form objects dir:tree holes");
    let took = start.elapsed();
    assert!(took < Duration::from_secs(20), "a hole of a tebibyte took {took:?}");
    let objects = std::fs::read_dir(place.path("store/objects")).unwrap();
    let files = objects.flat_map(|it| std::fs::read_dir(it.unwrap().path()).unwrap());
    let blocks: u64 = files.map(|it| it.unwrap().metadata().unwrap().blocks()).sum();
    assert!(blocks * 512 < 4 << 20, "the hole takes {blocks} blocks");

    // A signal ends work whose duration is proportional to the size of a file.
    let size = 100 << 30;
    let length = sparse_tar(&place.path("root.tar"), size);
    let layout = place.path("layout");
    let layer = format!("{}11", "22".repeat(31));
    std::fs::create_dir_all(layout.join("blobs/sha256")).unwrap();
    std::fs::hard_link(place.path("root.tar"), layout.join("blobs/sha256").join(&layer)).unwrap();
    layout_of(&layout, &layer, length);
    for (line, signal) in [
        ("import --form packed dir:tree a", Signal::TERM),
        ("import --form objects tar:root.tar b", Signal::INT),
        ("import --form objects oci:layout c", Signal::TERM),
        ("convert --form packed holes d", Signal::HUP),
        ("export holes tar:-", Signal::TERM),
        ("export holes erofs:-", Signal::INT),
    ] {
        let arguments: Vec<&str> = line.split(' ').collect();
        interrupted(place.command(&arguments), signal);
    }
    assert_eq!(place.out("images --quiet").lines().count(), 1);
}

/// Makes a layout with one layer.
fn layout_of(layout: &Path, layer: &str, size: u64) {
    let put = |bytes: &str| {
        let digest = store::Digest::sha256(bytes.as_bytes()).to_string();
        let name = digest.strip_prefix("sha256:").unwrap();
        std::fs::write(layout.join("blobs/sha256").join(name), bytes).unwrap();
        format!(r#""digest":"{digest}","size":{}"#, bytes.len())
    };
    let diff_id = format!("sha256:{layer}");
    let config = format!(
        r#"{{"architecture":"amd64","os":"linux","rootfs":{{"type":"layers","diff_ids":["{diff_id}"]}}}}"#
    );
    let config = put(&config);
    let layer = format!(r#""digest":"sha256:{layer}","size":{size}"#);
    let manifest =
        put(&format!(r#"{{"schemaVersion":2,"config":{{{config}}},"layers":[{{{layer}}}]}}"#));
    std::fs::write(
        layout.join("index.json"),
        format!(r#"{{"schemaVersion":2,"manifests":[{{{manifest}}}]}}"#),
    )
    .unwrap();
    std::fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
}

/// Files of a directory on XFS share their blocks with the store.
#[test]
fn files_of_directories_share_blocks_with_the_store() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let (disk, point) = (place.path("disk"), place.path("point"));
    File::create(&disk).unwrap().set_len(400 << 20).unwrap();
    std::fs::create_dir(&point).unwrap();
    let Some(mut mkfs) = testing::command("mkfs.xfs") else { return };
    let made = mkfs.args(["-q", "-m", "reflink=1"]).arg(&disk).status();
    assert!(made.unwrap().success());
    let mounted = Command::new("mount").args(["-o", "loop"]).args([&disk, &point]).status();
    if !mounted.unwrap().success() {
        testing::skipped("this machine mounts no XFS");
        return;
    }
    std::fs::create_dir(point.join("tree")).unwrap();
    std::fs::write(point.join("tree/large"), testing::noise(64 << 20)).unwrap();
    std::fs::write(point.join("tree/small"), testing::noise(300 << 10)).unwrap();
    let free = || {
        let file = File::open(&point).unwrap();
        rustix::fs::syncfs(&file).unwrap();
        let found = rustix::fs::fstatvfs(&file).unwrap();
        found.f_bfree * found.f_frsize
    };
    let before = free();
    let run = |line: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
        command.arg("--store").arg(point.join("store")).args(line.split(' '));
        Ran::from_output(&command.current_dir(&point).output().unwrap())
    };
    let ran = run("import --quiet --form objects dir:tree a");
    let taken = before - free();
    let found = run("fsck");
    let ended = Command::new("umount").arg(&point).status().unwrap();
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert_eq!(found.code, Some(0), "{}", found.err);
    assert!(taken < 20 << 20, "{taken} bytes were taken");
    assert!(ended.success());
}
