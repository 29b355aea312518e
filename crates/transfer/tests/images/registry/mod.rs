//! Tests pulls and pushes with faulty registries, all on loopback.
#![expect(clippy::print_stdout, reason = "tests say what they skip")]

mod again;
mod attached;
mod faults;
mod forms;
mod lazy;
mod peers;
mod proxy;
mod pulls;
mod pushes;
mod real;
mod tables;
mod tenants;
mod updates;

use std::io::Read as _;
use std::time::Duration;

use image::verity::ImageId;
use oci::Digest;
use oci::reference::Reference;
use oci::registry::{BlobReader, Registry, Settings};
use testing::{chain, noise};

/// Timeouts that are just long enough for a busy machine.
fn settings() -> Settings {
    Settings {
        retries: 3,
        backoff: Duration::from_millis(10),
        stall: Duration::from_millis(1500),
        ..Settings::default()
    }
}

/// The repository `app` at `host`.
fn registry(host: &str, settings: &Settings) -> Registry {
    let reference: Reference = format!("{host}/app").parse().unwrap();
    Registry::new(&reference, settings).unwrap()
}

/// A directory with a `hosts.toml` for `host`.
struct Hosts(tempfile::TempDir);

impl Hosts {
    fn new(host: &str, text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join(host)).unwrap();
        std::fs::write(folder.path().join(host).join("hosts.toml"), text).unwrap();
        Self(folder)
    }

    fn settings(&self) -> Settings {
        Settings { hosts: vec![self.0.path().to_owned()], ..settings() }
    }
}

/// Returns all bytes of a reader, or the whole text of its error.
fn read(mut reader: BlobReader) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    match reader.read_to_end(&mut bytes) {
        Ok(_) => Ok(bytes),
        Err(error) => Err(chain(&error)),
    }
}

/// Compares bytes without printing megabytes of them.
fn assert_same(got: &[u8], expect: &[u8]) {
    let at = got.iter().zip(expect).position(|(one, other)| one != other);
    assert_eq!((at, got.len()), (None, expect.len()));
}

fn digest(bytes: &[u8]) -> Digest {
    Digest::sha256(bytes)
}
