//! The registry client, against misbehaving servers, all on loopback.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod auth;
mod blobs;
mod connect;
mod http2;
mod http2_server;
mod logins;
mod manifests;
mod parts;
mod peers;
mod routes;
mod secure;
mod slow;
mod uploads;

use std::io::Read as _;
use std::path::PathBuf;
use std::time::Duration;

use quire_oci::Digest;
use quire_oci::reference::Reference;
use quire_oci::registry::{BlobReader, Registry, Settings};
use testing::{chain, noise};

/// Settings with timeouts that are just long enough for a busy machine.
fn settings() -> Settings {
    Settings {
        retries: 3,
        backoff: Duration::from_millis(10),
        stall: Duration::from_millis(1500),
        ..Settings::default()
    }
}

/// Makes a client for the repository `app` at `host`.
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

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

/// Reads a whole blob. Returns an error with all its causes as text.
fn read(mut reader: BlobReader) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    match reader.read_to_end(&mut bytes) {
        Ok(_) => Ok(bytes),
        Err(error) => Err(chain(&error)),
    }
}

/// Compares the first difference only, so that a failure does not print megabytes.
fn assert_same(got: &[u8], expect: &[u8]) {
    let at = got.iter().zip(expect).position(|(one, other)| one != other);
    assert_eq!((at, got.len()), (None, expect.len()));
}

fn digest(bytes: &[u8]) -> Digest {
    Digest::sha256(bytes)
}
