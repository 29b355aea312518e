//! Tests images with a common device: wrong indexes and failing sources of one image must not affect another.

use std::fs;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use image::digest::Digest;
use image::lazy::UNIT;
use oci::blobs::{BlobSource, FailingReader};
use quire_serve::lazy::{ClientError, LayerFiller, LayerSource};
use testing::fake::wait_for;

use super::service::{FolderBlob, STOP, Served};
use super::{Stage, store};

/// Manifest of an image whose registry does not respond while a file exists.
pub(super) const SILENT: &[u8] = b"silent";

pub(super) struct SilentBlob {
    pub(super) folder: PathBuf,
    pub(super) blob: Arc<FolderBlob>,
}

impl BlobSource for SilentBlob {
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        let silent = self.folder.join("silent");
        if !silent.exists() {
            return self.blob.blob(digest, size, range);
        }
        fs::write(self.folder.join("asked"), "").unwrap();
        while silent.exists() && !STOP.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(5));
        }
        Box::new(FailingReader::new(io::ErrorKind::TimedOut.into()))
    }
}

/// Two images have the same device, and the index of one of them is wrong.
#[test]
fn an_index_that_lies_takes_nothing_from_another_image() {
    let Some(stage) = Stage::new() else { return };
    let all = 0..stage.index.head.device_bytes;
    let source = |manifest: &[u8]| {
        let manifest = Some(Digest::sha256(manifest));
        LayerSource { blobs: Box::new(&stage.blob), manifest, host: None }
    };
    let folder = tempfile::tempdir_in(stage.folder.path()).unwrap();
    let lazy = store(&folder.path().join("lazy"));
    let device = lazy.create_lazy_device(&stage.device(), all.end).unwrap();
    let mut lie = stage.index.clone();
    lie.head.spans[1..].iter_mut().for_each(|it| it.packed += 3);
    let liar = LayerFiller::from_source(lie, source(b"liar"), device);
    let honest = liar.beside(stage.index.clone(), source(b"honest")).unwrap();
    liar.ensure(all.clone(), |_| ()).unwrap_err();
    assert!(liar.is_denied(&all) && !honest.is_denied(&all));
    honest.ensure(all.clone(), |_| ()).unwrap();
    // The bytes are verified, so both fillers have them.
    assert!(liar.has(&all) && liar.is_full() && liar.ensure(all, |_| ()).is_ok());
    // If two indexes contradict each other, it is unknown which one is wrong, so the second filler is refused.
    let mut other = stage.index.clone();
    other.head.units[0][0] ^= 1;
    assert!(honest.beside(other, source(b"other")).is_none());
}

/// Two images have the same layer, and the registry of one of them stops responding.
#[test]
fn an_image_whose_source_is_silent_keeps_no_other_from_its_bytes() {
    let Some(served) = Served::new() else { return };
    fs::write(served.path("silent"), "").unwrap();
    let mut service = served.start();
    let lend = |manifest: &[u8]| {
        let service = served.service().with_manifest(Some(Digest::sha256(manifest)));
        service.lend(&served.stage.device()).unwrap()
    };
    let (silent, other) = (lend(SILENT), lend(b"another"));
    let head = &served.stage.index.head;
    let length = head.device_bytes;
    // More units than threads for one image.
    assert!(head.units.len() > 100, "{}", head.units.len());
    thread::scope(|scope| {
        let mut waiting = Vec::new();
        for unit in 0..head.units.len() as u64 {
            let silent = &silent;
            let read = move || silent.read_exact_at(&mut [0; 512], unit * UNIT);
            waiting.push(scope.spawn(read));
        }
        thread::sleep(Duration::from_millis(500));
        assert!(waiting.iter().all(|it| !it.is_finished()));
        let begun = Instant::now();
        let compare = |units: Range<usize>| {
            for unit in units {
                let place = unit as u64 * UNIT;
                let mut bytes = vec![0; usize::try_from(UNIT.min(length - place)).unwrap()];
                other.read_exact_at(&mut bytes, place).unwrap();
                assert!(head.is_unit(unit, &bytes), "{unit}");
            }
        };
        compare(0..90);
        // A restarted service knows the image of each connection.
        service.kill().unwrap();
        service.wait().unwrap();
        compare(90..head.units.len());
        // Readers of the other image did not wait for a timeout.
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
        fs::remove_file(served.path("silent")).unwrap();
        // The waiting readers get the bytes that the other image fetched. Before Linux 6.9, requests that a killed
        // service had taken fail.
        for reader in waiting {
            let read = reader.join().unwrap();
            assert!(read.is_ok() || !served.resends, "{read:?}");
        }
    });
    drop((silent, other));
    let service = served.start();
    served.end(service);
}

/// A request to a source may last minutes after the last reader was killed.
#[test]
fn a_silent_source_does_not_keep_a_service_without_readers() {
    let Some(served) = Served::new() else { return };
    fs::write(served.path("silent"), "").unwrap();
    let mut service = served.start();
    let client = served.service().with_manifest(Some(Digest::sha256(SILENT)));
    let device = client.lend(&served.stage.device()).unwrap();
    let mut reader = Command::new("sha256sum").stdin(device).spawn().unwrap();
    wait_for("the request to the source", || served.path("asked").exists());
    assert!(matches!(served.service().stop(), Err(ClientError::Refused(_))));
    reader.kill().unwrap();
    reader.wait().unwrap();
    drop(client);
    // The kernel releases the device a moment later.
    wait_for("the end of the service", || served.service().stop().is_ok());
    assert!(service.wait().unwrap().success());
    served.is_over();
}
