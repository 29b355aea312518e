//! Images that are published before their devices are here.

use std::fs;
use std::io::{Cursor, Read};
use std::ops::Range;

use image::digest::Digest;
use image::verity::{DeviceId, ImageId};
use oci::blobs::BlobSource;
use oci::source::{Choice, Source};
use quire_transfer::StoredImage;
use quire_transfer::import::{ImportWishes, import};
use quire_transfer::lazy::{IndexedLayer, LayerIndex, LazyImage, LazyPublishError, publish};
use store::{
    Form, FsckOptions, OpenDevice, OpenImageError, Origin, Presence, RefName, Seconds, Store,
};

use crate::build::{Layout, Pack, Tar};
use crate::home::{Home, NEVER, usual_wishes};

/// The blobs of a layout.
struct Blobs<'a>(&'a Layout<'a>);

impl BlobSource for Blobs<'_> {
    fn blob(&self, digest: &Digest, _: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        let bytes = fs::read(self.0.blob_path(digest)).unwrap();
        let [start, end] = [range.start, range.end].map(|it| usize::try_from(it).unwrap());
        Box::new(Cursor::new(bytes[start..end].to_vec()))
    }
}

/// What a registry would have of an image, taken from a store that has all of it.
struct Offered {
    image: Vec<u8>,
    id: ImageId,
    documents: StoredImage,
    indexes: Vec<LayerIndex>,
}

impl Offered {
    fn new(home: &Home) -> Self {
        let directory = home.path("layout");
        let mut layout = Layout::new(&directory);
        let text = |length: usize| -> Vec<u8> {
            let noise = testing::noise(length);
            noise.iter().flat_map(|it| format!("{} ", it % 97).into_bytes()).collect()
        };
        let tars = [
            (Tar::of("d etc").file("etc/one", &text(200_000)).bytes(), Pack::Gzip),
            // No file: the image has no device of it.
            (Tar::of("d empty").bytes(), Pack::Gzip),
            (Tar::default().file("two", &text(100_000)).bytes(), Pack::Gzips),
        ];
        let (descriptor, _) = layout.image(&tars);
        layout.add(descriptor, Some("one"), None);
        let source = Source::Layout { directory: directory.clone(), choice: Choice::Only };
        let wishes = ImportWishes { form: Form::Tar, ..usual_wishes() };
        let report = import(&home.store, &source, &home.surroundings(), &wishes).unwrap();
        let documents = StoredImage::load(&home.store, &report.manifest.unwrap()).unwrap();
        let open = home.store.open_image(&report.image).unwrap();
        let path = home.path("store").join("images").join(report.image.to_string());
        let mut indexes = Vec::new();
        for (layer, diff_id) in documents.manifest.layers.iter().zip(documents.config.diff_ids()) {
            let is_of =
                |it: &&OpenDevice| home.store.devices.layer_of(&it.id).unwrap() == Some(*diff_id);
            let Some(OpenDevice { id, file, .. }) = open.devices.iter().find(is_of) else {
                continue;
            };
            let indexed = IndexedLayer { layer, diff_id, device: id, file };
            indexes.push(LayerIndex::new(&indexed, &Blobs(&layout), &NEVER).unwrap());
        }
        assert_eq!((open.devices.len(), indexes.len()), (2, 2));
        Self { image: fs::read(path).unwrap(), id: report.image, documents, indexes }
    }
    fn publish(&self, store: &Store) -> Result<Vec<DeviceId>, LazyPublishError> {
        let StoredImage { digest, manifest_bytes, manifest, config_bytes, .. } = &self.documents;
        let origin = Origin { manifest: Some(*digest), repository: Some("r.example/one".into()) };
        let lazy = LazyImage {
            image: &self.image,
            id: &self.id,
            manifest: digest,
            documents: &[(digest, manifest_bytes), (&manifest.config.digest, config_bytes)],
            indexes: &self.indexes,
            name: &name(),
            origin: &origin,
            now: NOW,
        };
        publish(store, &lazy).map(|it| it.lazy)
    }

    fn devices(&self) -> Vec<DeviceId> {
        self.indexes.iter().map(|it| it.head.device).collect()
    }
}

const NOW: Seconds = Seconds(1_700_000_000);

fn name() -> RefName {
    "one".parse().unwrap()
}

fn damage(store: &Store) -> Vec<store::Damage> {
    let report = store.fsck(FsckOptions::default()).unwrap();
    report.damage.into_iter().map(|it| it.0).collect()
}

#[test]
fn an_image_is_published_before_its_devices_and_goes_as_a_whole() {
    let offered = Offered::new(&Home::new());
    let home = Home::new();
    let store = &home.store;
    assert_eq!(offered.publish(store).unwrap(), offered.devices());
    for (device, index) in offered.devices().iter().zip(&offered.indexes) {
        assert!(LayerIndex::load(store, device).unwrap().unwrap() == *index);
        assert_eq!(store.sparse.stat(device).unwrap().unwrap().bytes, index.head.device_bytes);
    }
    assert_eq!(damage(store), []);
    let (_, swept) = store.gc(NOW).unwrap();
    assert_eq!(swept.removed, 0);
    assert_eq!(damage(store), []);
    assert_eq!(store.presence(&offered.id).unwrap(), Presence::Partial);
    assert!(matches!(store.open_image(&offered.id), Err(OpenImageError::Partial(_))));
    let told = store.open_image(&offered.id).unwrap_err().to_string();
    assert!(told.contains("--lazy"), "{told}");
    // Again: all of it is there.
    assert_eq!(offered.publish(store).unwrap(), offered.devices());

    assert!(store.remove_ref(&name()).unwrap().is_some());
    // A child of another test may have a device open for a moment.
    for _ in 0..400 {
        store.gc(NOW).unwrap();
        if store.du().unwrap().sparse == 0 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let used = store.du().unwrap();
    let all = [used.sparse, used.data, used.image_files, used.manifests, used.blobs, used.layers];
    assert_eq!(all, [0; 6]);
}

#[test]
fn devices_that_are_here_are_taken_as_they_are() {
    let home = Home::new();
    let offered = Offered::new(&home);
    assert_eq!(offered.publish(&home.store).unwrap(), []);
    home.store.open_image(&offered.id).unwrap();
    assert_eq!(home.store.presence(&offered.id).unwrap(), Presence::Complete);
    assert_eq!(damage(&home.store), []);
}

#[test]
fn an_image_without_all_that_fills_it_is_not_published() {
    let mut offered = Offered::new(&Home::new());
    let home = Home::new();
    let refused = |offered: &Offered, expect: &str| {
        let error = offered.publish(&home.store).unwrap_err();
        let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        assert!(format!("{error}: {source}").contains(expect), "{error}: {source}");
        let used = home.store.du().unwrap();
        assert!(used.images.is_empty() && used.manifests == 0 && used.sparse == 0, "{used:?}");
    };
    let index = offered.indexes.pop().unwrap();
    refused(&offered, &format!("needs device {}, which", index.head.device));
    offered.indexes.push(LayerIndex { windows: Vec::new(), ..index.clone() });
    refused(&offered, "cannot add a sparse device");
    offered.indexes.pop();
    offered.indexes.push(index);
    let byte = offered.image.len() - 1;
    offered.image[byte] ^= 1;
    refused(&offered, "not the one that was asked for");
    offered.image.truncate(100);
    refused(&offered, "cannot read the image");
}
