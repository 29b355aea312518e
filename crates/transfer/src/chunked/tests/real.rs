//! Tests with layers that Podman and crane made.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use testing::daemon::{Daemon, PROGRAM};

use super::make::{self, Habits, noise};
use super::{Did, Memory, pull_from, store};
use crate::chunked::plan::Costs;
use crate::chunked::toc::Format;
use image::digest::Digest;
use oci::manifest::Descriptor;

/// Makes two versions of an image's files, as tars. A tenth of the bytes is new in the second version.
fn versions(folder: &Path) -> [PathBuf; 2] {
    [1, 2].map(|version| {
        let mut files = vec![("usr/".to_owned(), Vec::new())];
        let mut big = noise(77, 10 << 20);
        if version == 2 {
            big[5 << 20] ^= 1;
        }
        files.push(("usr/big".to_owned(), big));
        for number in 0..150 {
            let is_new = number == 60 || number == 61;
            let seed = if is_new { version * 1000 } else { 0 } + number;
            let length = 20_000 + usize::try_from(number).unwrap() * 100;
            files.push((format!("usr/file{number:03}"), noise(seed, length)));
            files.push((format!("usr/tiny{number:03}"), number.to_string().into_bytes()));
            if number % 10 == 0 {
                files.push((format!("usr/empty{number:03}"), Vec::new()));
            }
        }
        let files: Vec<_> = files.iter().map(|(name, it)| (name.as_str(), it.clone())).collect();
        let tar = make::layer(&files, &Habits::for_format(Format::ZstdChunked)).tar;
        let path = folder.join(format!("{version}.tar"));
        fs::write(&path, tar).unwrap();
        path
    })
}

/// Returns the blob, the descriptor and the diff id of the only layer in a layout.
fn only_layer(layout: &Path) -> (Vec<u8>, Descriptor, Digest) {
    let json = |path: &Path| -> Value { serde_json::from_slice(&fs::read(path).unwrap()).unwrap() };
    let blob =
        |digest: &Value| layout.join("blobs").join(digest.as_str().unwrap().replace(':', "/"));
    let manifest = json(&blob(&json(&layout.join("index.json"))["manifests"][0]["digest"]));
    let layer = &manifest["layers"][0];
    let config = json(&blob(&manifest["config"]["digest"]));
    let diff_id = config["rootfs"]["diff_ids"][0].as_str().unwrap().parse().unwrap();
    let bytes = fs::read(blob(&layer["digest"])).unwrap();
    (bytes, serde_json::from_value(layer.clone()).unwrap(), diff_id)
}

/// Pulls both versions. Returns the statistics of the second pull, and the size of its layer.
fn check_update(layouts: &[PathBuf; 2]) -> (Did, u64) {
    let folder = store();
    let mut all = layouts.iter().map(|layout| {
        let (blob, descriptor, diff_id) = only_layer(layout);
        let memory = Memory::from_blob(&blob);
        let did = pull_from(&folder, &memory, &descriptor, &diff_id, Costs::default());
        println!("{did:?} of {}", descriptor.size);
        (did, descriptor.size)
    });
    let (first, _) = all.next().unwrap();
    assert_eq!((first.whole, first.skipped), (1, 0));
    all.next().unwrap()
}

/// Runs a program. Returns `None` if it is not installed.
fn run(command: &mut Command) -> Option<Output> {
    match command.stdin(Stdio::null()).output() {
        Ok(output) => {
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{command:?}: {errors}");
            Some(output)
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            testing::skipped(&format!("{} is not installed", command.get_program().display()));
            None
        }
        Err(error) => panic!("{command:?}: {error}"),
    }
}

#[test]
fn zstd_chunked_by_podman() {
    if fs::metadata("/proc/self").unwrap().uid() != 0 {
        testing::skipped("podman makes images without a user namespace only for root");
        return;
    }
    let Some(program) = testing::program("podman") else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let podman = || {
        let mut podman = Command::new(&program);
        podman.arg("--root").arg(path("root")).arg("--runroot").arg(path("run"));
        podman.args(["--storage-driver=vfs", "--cgroup-manager=cgroupfs"]);
        podman
    };
    let mut layouts = Vec::new();
    for (number, tar) in versions(folder.path()).iter().enumerate() {
        let name = format!("localhost/image:{number}");
        if run(podman().arg("import").arg(tar).arg(&name)).is_none() {
            return;
        }
        let layout = path(&format!("layout{number}"));
        let to = format!("oci:{}:1", layout.display());
        run(podman().args(["push", "--compression-format=zstd:chunked", &name, &to])).unwrap();
        layouts.push(layout);
    }
    let (did, size) = check_update(&layouts.try_into().unwrap());
    assert_eq!(did.whole, 0);
    assert!(did.fetched < size / 20 && did.skipped > size * 9 / 10, "{did:?}");
}

#[test]
fn estargz_by_crane() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = testing::crane() else { return };
    let crane = || Command::new(&program);
    let Some(registry) = Daemon::start(folder.path(), "").unwrap() else {
        testing::skipped(&format!("{PROGRAM} is not installed"));
        return;
    };
    let mut layouts = Vec::new();
    for (number, tar) in versions(folder.path()).iter().enumerate() {
        let name = |kind: &str| format!("{}/{kind}:{number}", registry.host);
        run(crane().arg("append").arg("-f").arg(tar).args(["-t", &name("plain")])).unwrap();
        run(crane().args(["optimize", &name("plain"), &name("estargz")])).unwrap();
        let layout = folder.path().join(format!("layout{number}"));
        run(crane().args(["pull", "--format=oci", &name("estargz")]).arg(&layout)).unwrap();
        layouts.push(layout);
    }
    let (did, size) = check_update(&layouts.try_into().unwrap());
    assert_eq!(did.whole, 0);
    // A chunk of 4 MiB is new.
    assert!(did.fetched < size / 2 && did.skipped > size / 2, "{did:?}");
}
