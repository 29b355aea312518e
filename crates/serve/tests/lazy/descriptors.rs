//! Tests a service that runs out of descriptors.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::process::Command;
use std::thread;
use std::time::Duration;

use image::lazy::UNIT;
use quire_serve::lazy::SourcePatience;
use rustix::process::{Resource, Rlimit};

use super::{Stage, with_patience};

/// A read needs no descriptor, so a service that has none left serves its readers.
#[test]
fn readers_need_no_descriptors() {
    // The limit affects the whole process, so the test runs in a separate one.
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([
        "--exact",
        "descriptors::in_a_process_with_few_descriptors",
        "--ignored",
        "--nocapture",
    ]);
    assert!(child.status().unwrap().success());
}

#[test]
#[ignore = "what another test starts"]
fn in_a_process_with_few_descriptors() {
    let Some(stage) = Stage::new() else { return };
    let expect = fs::read(stage.tree.join("words")).unwrap();
    let pages: Vec<u64> = (0..expect.len() as u64 / UNIT).map(|it| it * UNIT).collect();
    assert!(pages.len() > 60, "{} readers exhaust nothing", pages.len());
    let part = |page: u64| {
        let start = usize::try_from(page).unwrap();
        &expect[start..start + 100]
    };
    let patience = SourcePatience::default().with_pauses(Duration::ZERO, Duration::ZERO);
    with_patience(&stage, &patience, |root| {
        let file = File::open(root.join("words")).unwrap();
        let read = |page: u64| {
            let mut bytes = [0; 100];
            file.read_exact_at(&mut bytes, page).map(|()| bytes)
        };
        let limit = rustix::process::getrlimit(Resource::Nofile);
        let open = fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        let few = Rlimit { current: Some(open), ..limit };
        rustix::process::setrlimit(Resource::Nofile, few).unwrap();
        thread::scope(|scope| {
            let readers: Vec<_> =
                pages.iter().map(|page| (*page, scope.spawn(|| read(*page)))).collect();
            for (page, reader) in readers {
                assert!(reader.join().unwrap().unwrap() == part(page), "{page}");
            }
        });
        rustix::process::setrlimit(Resource::Nofile, limit).unwrap();
    });
}
