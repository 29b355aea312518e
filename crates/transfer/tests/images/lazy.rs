//! Tests images that are published before their devices are downloaded.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Cursor, Read};
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Mutex;

use image::digest::Digest;
use image::verity::{DeviceId, ImageId};
use oci::blobs::BlobSource;
use oci::source::{Choice, ImageSource};
use quire_transfer::StoredImage;
use quire_transfer::import::{Completed, ImportOptions, Report, complete, import, prove};
use quire_transfer::lazy::{
    IndexedLayer, LayerIndex, LazyImage, LazyPublishError, LazyPublished, PreviousVersions,
    previous_start, publish, start_blocks,
};
use store::{
    Form, FsckOptions, IndexWindows, OpenDevice, OpenImageError, Origin, Presence, RefName,
    Reference, Seconds, Store, Trace, TraceRun, Traces,
};
use testing::images::{patch, set_checksum};

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

/// The parts of an image in a registry, taken from a store that has the complete image.
struct Offered {
    image: Vec<u8>,
    id: ImageId,
    documents: StoredImage,
    indexes: Vec<LayerIndex>,
    /// Blobs of the image's layers.
    blobs: Memory,
    /// The bytes of each device.
    devices: Vec<Vec<u8>>,
}

/// Blobs in memory, which may be incomplete.
#[derive(Default)]
struct Memory {
    blobs: BTreeMap<Digest, Vec<u8>>,
    asked: Mutex<Vec<Digest>>,
}

impl BlobSource for Memory {
    fn blob(&self, digest: &Digest, _: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        self.asked.lock().unwrap().push(*digest);
        let [start, end] = [range.start, range.end].map(|it| usize::try_from(it).unwrap());
        let blob = self.blobs.get(digest).map_or(&[][..], |it| &it[start..end]);
        Box::new(Cursor::new(blob.to_vec()))
    }
}

fn tars() -> [(Vec<u8>, Pack); 3] {
    let text = |length: usize| -> Vec<u8> {
        let noise = testing::noise(length);
        noise.iter().flat_map(|it| format!("{} ", it % 97).into_bytes()).collect()
    };
    [
        (Tar::from_text("d etc").file("etc/one", &text(200_000)).bytes(), Pack::Gzip),
        // This layer has no file, so the image has no device for it.
        (Tar::from_text("d empty").bytes(), Pack::Gzip),
        (Tar::default().file("two", &text(100_000)).bytes(), Pack::Gzips),
    ]
}

fn import_layers<'d>(
    home: &Home,
    directory: &'d Path,
    tars: &[(Vec<u8>, Pack)],
) -> (Layout<'d>, Report) {
    let mut layout = Layout::new(directory);
    let (descriptor, _) = layout.image(tars);
    layout.add(descriptor, Some("one"), None);
    let source = ImageSource::Layout { directory: directory.to_owned(), choice: Choice::Only };
    let options = ImportOptions { form: Form::Tar, ..usual_wishes() };
    let report = import(&home.store, &source, &home.environment(), &options).unwrap();
    (layout, report)
}

impl Offered {
    /// Returns an image with a different file name than in its layers, and the id of the correct image.
    fn false_one() -> (Self, ImageId) {
        let mut offered = Self::new(&Home::new());
        let right = offered.id;
        offered.lie();
        (offered, right)
    }

    fn lie(&mut self) {
        patch(&mut self.image, b"two", b"tow");
        self.id = id_of(&self.image).into();
    }

    fn new(home: &Home) -> Self {
        let directory = home.path("layout");
        let (layout, report) = import_layers(home, &directory, &tars());
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
        let blobs = documents.manifest.layers.iter();
        let blobs = blobs.map(|it| (it.digest, fs::read(layout.blob_path(&it.digest)).unwrap()));
        let blobs = Memory { blobs: blobs.collect(), ..Memory::default() };
        let bytes = |it: &LayerIndex| {
            fs::read(home.path("store").join("data").join(it.head.device.to_string())).unwrap()
        };
        let devices = indexes.iter().map(bytes).collect();
        Self {
            image: fs::read(path).unwrap(),
            id: report.image,
            documents,
            indexes,
            blobs,
            devices,
        }
    }

    /// Fills a device, and seals it.
    fn fill(&self, store: &Store, at: usize) {
        let filling = store.fill_lazy_device(&self.indexes[at].head.device).unwrap().unwrap();
        filling.write_at(&self.devices[at], 0).unwrap();
        filling.seal().unwrap();
    }

    fn complete(&self, home: &Home) -> Completed {
        let (manifest, environment) = (&self.documents.digest, home.environment());
        complete(&home.store, &self.id, manifest, &self.blobs, &environment).unwrap()
    }

    /// Publishes the image. Returns its lazy devices; none if the image was not published because the store has all
    /// data.
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
        Ok(match publish(store, &lazy)? {
            LazyPublished::Lazy(devices) => devices,
            LazyPublished::AllIsHere => Vec::new(),
        })
    }

    fn device_ids(&self) -> Vec<DeviceId> {
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
    assert_eq!(offered.publish(store).unwrap(), offered.device_ids());
    for (device, index) in offered.device_ids().iter().zip(&offered.indexes) {
        assert!(LayerIndex::load(store, device, None).unwrap().unwrap() == *index);
        assert_eq!(
            store.lazy_devices.stat(device).unwrap().unwrap().bytes,
            index.head.device_bytes
        );
    }
    assert_eq!(damage(store), []);
    let (_, swept) = store.gc(NOW).unwrap();
    assert_eq!(swept.removed, 0);
    assert_eq!(damage(store), []);
    assert_eq!(store.presence(&offered.id).unwrap(), Presence::Partial);
    assert!(matches!(store.open_image(&offered.id), Err(OpenImageError::Partial(_))));
    let told = store.open_image(&offered.id).unwrap_err().to_string();
    assert!(told.contains("--lazy"), "{told}");
    // Publishing again changes nothing.
    assert_eq!(offered.publish(store).unwrap(), offered.device_ids());

    assert!(store.remove_ref(&name()).unwrap().is_some());
    // A child process of another test may have a device open for a moment.
    for _ in 0..400 {
        store.gc(NOW).unwrap();
        if store.du().unwrap().lazy_devices == 0 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let used = store.du().unwrap();
    let all =
        [used.lazy_devices, used.data, used.image_files, used.manifests, used.blobs, used.layers];
    assert_eq!(all, [0; 6]);
}

#[test]
fn devices_that_are_here_are_taken_as_they_are() {
    let offered = Offered::new(&Home::new());
    let home = Home::new();
    // An import of another image adds the first device.
    import_layers(&home, &home.path("layout"), &tars()[..1]);
    let [one, two] = offered.device_ids()[..] else { panic!("two devices") };
    assert_eq!(offered.publish(&home.store).unwrap(), [two]);
    assert!(home.store.lazy_devices.stat(&one).unwrap().is_none());
    assert_eq!(home.store.presence(&offered.id).unwrap(), Presence::Partial);
    assert_eq!(damage(&home.store), []);
}

/// The store would treat the image as complete, and would not compare it with its layers.
#[test]
fn an_image_of_which_all_is_here_is_not_published() {
    let home = Home::new();
    let mut offered = Offered::new(&home);
    offered.lie();
    assert_eq!(offered.publish(&home.store).unwrap(), []);
    assert!(matches!(home.store.open_image(&offered.id), Err(OpenImageError::Absent(_))));
    assert!(home.store.refs.get(&name()).unwrap().is_none());
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
        assert!(
            used.images.is_empty() && used.manifests == 0 && used.lazy_devices == 0,
            "{used:?}"
        );
    };
    let index = offered.indexes.pop().unwrap();
    refused(&offered, &format!("needs device {}, which", index.head.device));
    offered.indexes.push(LayerIndex { windows: IndexWindows::Groups(Vec::new()), ..index.clone() });
    refused(&offered, "cannot add a lazy device");
    offered.indexes.pop();
    offered.indexes.push(index);
    let byte = offered.image.len() - 1;
    offered.image[byte] ^= 1;
    refused(&offered, "not the requested one");
    offered.image.truncate(100);
    refused(&offered, "cannot read the image");
}

#[test]
fn an_image_whose_devices_are_filled_is_the_one_that_a_pull_makes() {
    let offered = Offered::new(&Home::new());
    let home = Home::new();
    let store = &home.store;
    offered.publish(store).unwrap();
    assert_eq!(offered.complete(&home), Completed::NotYet);
    offered.fill(store, 0);
    assert_eq!(offered.complete(&home), Completed::NotYet);
    offered.fill(store, 1);
    let place = |folder: &str, id: &DeviceId| home.path("store").join(folder).join(id.to_string());
    let inodes = |folder: &str| -> Vec<u64> {
        let ids = offered.device_ids();
        ids.iter().map(|id| fs::metadata(place(folder, id)).unwrap().ino()).collect()
    };
    let before = inodes("lazy");
    let origins = store.downloads.origins(&offered.id).unwrap();

    assert_eq!(offered.complete(&home), Completed::Same);
    // These are the same files as before, which mounts may have open, under the names of a full import.
    assert_eq!(inodes("data"), before);
    assert_eq!(store.presence(&offered.id).unwrap(), Presence::Complete);
    let opened = store.open_image(&offered.id).unwrap();
    for (device, expect) in opened.devices.iter().zip(&offered.devices) {
        let mut bytes = Vec::new();
        (&device.file).read_to_end(&mut bytes).unwrap();
        assert!(bytes == *expect);
        assert!(store.lazy_devices.stat(&device.id).unwrap().is_none());
        assert!(!place("lazy", &device.id).with_extension("state").exists());
        // The index of the device is kept, so that it can be pushed.
        assert!(LayerIndex::load(store, &device.id, None).unwrap().is_some());
    }
    assert_eq!(damage(store), []);
    let report = store.fsck_deep(FsckOptions::default()).unwrap();
    assert!(report.is_sound(), "{:?}", report.damage);
    // Only the layer without a device was requested.
    assert_eq!(*offered.blobs.asked.lock().unwrap(), [offered.documents.manifest.layers[1].digest]);
    assert_eq!(store.downloads.origins(&offered.id).unwrap(), origins);
    let named = store.refs.get(&name()).unwrap().unwrap();
    assert_eq!((named.image, named.created), (offered.id, NOW));
    // As after a pull, `gc` removes only the tar of the layer without files.
    store.gc(NOW).unwrap();
    assert_eq!(inodes("data"), before);
    assert_eq!(damage(store), []);
    // A second call changes nothing.
    assert_eq!(offered.complete(&home), Completed::Same);

    // As after a pull, other imports find the objects.
    for layer in offered.documents.config.diff_ids() {
        std::io::copy(&mut store.layer_tar(layer).unwrap(), &mut std::io::sink()).unwrap();
    }
}

/// The trace `default` of an image shows what the next version reads at its start.
#[test]
fn a_trace_is_the_start_of_the_next_version() {
    let offered = Offered::new(&Home::new());
    let home = Home::new();
    let store = &home.store;
    offered.publish(store).unwrap();
    let [one, two] = offered.device_ids()[..] else { panic!("two devices") };
    let repositories = ["r.example/one".to_owned()];
    let manifest = Digest::sha256(b"the next version");
    let find = || {
        let wanted =
            PreviousVersions { manifest: &manifest, repositories: &repositories, replaced: None };
        previous_start(store, &wanted).unwrap()
    };
    let set = |name: &str, runs| {
        let mut traces = Traces::default();
        traces.set(Trace { name: name.to_owned(), runs, start: None }).unwrap();
        store.downloads.set_traces(&offered.id, &traces).unwrap();
    };
    let run = |device, block| TraceRun { device, block, blocks: 1 };
    assert_eq!(find(), None);
    set("other", vec![run(one, 3)]);
    assert_eq!(find(), None);
    // A block in the middle of each file, and one that the device does not have.
    let runs = vec![run(two, 7), run(one, 3), run(one, 1 << 20)];
    set("default", runs.clone());
    let start = find().unwrap();
    assert_eq!((start.started, start.is_whole), (offered.documents.digest, true));
    let files: Vec<_> = start.files().map(<[u8]>::to_vec).collect();
    let parts: Vec<_> =
        start.parts().map(|(file, part)| (&files[file][..], part.end - part.start)).collect();
    assert_eq!(parts, [(&b"/two"[..], 16384), (b"/etc/one", 16384)]);
    // In the same version, the files have the same places.
    let blocks = start_blocks(&store.image_file(&offered.id).unwrap(), &start).unwrap();
    assert_eq!(blocks, runs[..2]);
}

pub(crate) fn id_of(bytes: &[u8]) -> image::verity::VerityDigest {
    image::verity::digest(image::verity::Algorithm::Sha256, bytes)
}

#[test]
fn an_image_with_false_names_makes_way_for_the_right_one() {
    let (offered, right) = Offered::false_one();
    let home = Home::new();
    let store = &home.store;
    offered.publish(store).unwrap();
    offered.fill(store, 0);
    offered.fill(store, 1);
    assert_eq!(offered.complete(&home), Completed::Other(right));
    let named = store.refs.get(&name()).unwrap().unwrap();
    assert_eq!((named.image, named.manifest), (right, Some(offered.documents.digest)));
    assert_eq!(store.presence(&right).unwrap(), Presence::Complete);
    assert!(store.fsck_deep(FsckOptions::default()).unwrap().is_sound());
    // `gc` removes the false image.
    store.gc(NOW).unwrap();
    assert!(matches!(store.open_image(&offered.id), Err(OpenImageError::Absent(_))));
    assert_eq!(damage(store), []);
}

/// Otherwise, a user who can have one name pulled could replace the image of another name.
#[test]
fn a_name_of_another_manifest_is_left_alone() {
    let (mut offered, right) = Offered::false_one();
    let home = Home::new();
    let store = &home.store;
    offered.publish(store).unwrap();
    // The same image with another manifest.
    let bytes = [&offered.documents.manifest_bytes[..], b"\n"].concat();
    let (manifest, other) = (Digest::sha256(&bytes), "other".parse::<RefName>().unwrap());
    let import = store.begin().unwrap();
    import.manifest(&manifest, &bytes).unwrap();
    let named = store.refs.get(&name()).unwrap().unwrap();
    import.set_ref(other.clone(), Reference { manifest: Some(manifest), ..named });
    import.commit().unwrap();
    offered.fill(store, 0);
    offered.fill(store, 1);
    let image_of = |name: &RefName| store.refs.get(name).unwrap().unwrap().image;
    assert_eq!(offered.complete(&home), Completed::Other(right));
    assert_eq!((image_of(&name()), image_of(&other)), (right, offered.id));
    offered.documents.digest = manifest;
    assert_eq!(offered.complete(&home), Completed::Other(right));
    assert_eq!(image_of(&other), right);
}

/// Adds a name for an image that came with an index, as the image of this manifest.
fn also_named(store: &Store, text: &str, image: &ImageId, manifest: (Digest, Option<&[u8]>)) {
    let import = store.begin().unwrap();
    let (manifest, bytes) = manifest;
    if let Some(bytes) = bytes {
        import.manifest(&manifest, bytes).unwrap();
    }
    import.unproven(*image, manifest);
    let reference =
        Reference { image: *image, manifest: Some(manifest), form: Form::Tar, created: NOW };
    import.set_ref(text.parse().unwrap(), reference);
    import.commit().unwrap();
}

/// Another import adds the devices, not a filler.
#[test]
fn an_image_with_a_mark_is_compared_for_each_manifest() {
    let offered = Offered::new(&Home::new());
    let home = Home::new();
    let store = &home.store;
    let image_of = |text: &str| store.refs.get(&text.parse().unwrap()).unwrap().unwrap().image;
    let manifest = offered.documents.digest;
    let prove_of = |manifest: Option<&Digest>| {
        prove(store, &offered.id, manifest, &offered.blobs, &home.environment()).unwrap()
    };
    let prove = || prove_of(Some(&manifest));
    let presence = |manifest: Option<&Digest>| store.presence_of(&offered.id, manifest).unwrap();
    offered.publish(store).unwrap();
    assert_eq!(prove(), Completed::NotYet);
    assert_eq!(store.downloads.unproven(&offered.id).unwrap(), Some([manifest].into()));
    let (_, report) = import_layers(&home, &home.path("layout"), &tars());
    assert_eq!((report.image, report.manifest), (offered.id, Some(manifest)));
    // The import that completed the image had the same manifest.
    assert_eq!(store.presence(&offered.id).unwrap(), Presence::Complete);

    // Another manifest with the same layers.
    let bytes = [&offered.documents.manifest_bytes[..], b"\n"].concat();
    let two = Digest::sha256(&bytes);
    also_named(store, "two", &offered.id, (two, Some(&bytes)));
    assert_eq!(presence(Some(&two)), Presence::Unproven);
    // A manifest is compared only when it is used.
    assert_eq!((prove(), presence(Some(&two))), (Completed::Same, Presence::Unproven));
    assert_eq!(
        (presence(Some(&manifest)), presence(None)),
        (Presence::Complete, Presence::Complete)
    );
    assert_eq!((prove_of(Some(&two)), presence(Some(&two))), (Completed::Same, Presence::Complete));
    assert_eq!(image_of("two"), offered.id);

    // A manifest with other layers, whose index was false.
    let (_, less) = import_layers(&home, &home.path("other"), &tars()[..1]);
    also_named(store, "less", &offered.id, (less.manifest.unwrap(), None));
    assert_eq!(prove(), Completed::Same);
    assert_eq!(
        (presence(Some(&manifest)), presence(None)),
        (Presence::Complete, Presence::Complete)
    );
    assert_eq!(presence(less.manifest.as_ref()), Presence::Unproven);
    assert_eq!(prove_of(less.manifest.as_ref()), Completed::Other(less.image));
    assert_eq!([image_of("one"), image_of("less")], [offered.id, less.image]);
    assert_eq!(damage(store), []);
}

#[test]
fn a_false_image_with_a_mark_makes_way_for_the_right_one() {
    let (offered, right) = Offered::false_one();
    let home = Home::new();
    let store = &home.store;
    offered.publish(store).unwrap();
    import_layers(&home, &home.path("layout"), &tars());
    assert_eq!(store.presence(&offered.id).unwrap(), Presence::Unproven);
    assert!(matches!(store.open_image(&offered.id), Err(OpenImageError::Unproven(_))));
    let environment = home.environment();
    let manifest = Some(&offered.documents.digest);
    let none = Memory::default();
    let done = prove(store, &offered.id, manifest, &none, &environment).unwrap();
    assert_eq!(done, Completed::Other(right));
    assert_eq!(store.refs.get(&name()).unwrap().unwrap().image, right);
    store.open_image(&right).unwrap();
    // The false image has no name, and is still unproven.
    assert!(matches!(store.open_image(&offered.id), Err(OpenImageError::Unproven(_))));
    // The store had all layers of the image.
    assert_eq!(*none.asked.lock().unwrap(), []);
    assert_eq!(damage(store), []);
}

#[test]
fn a_device_of_another_layer_is_not_taken_for_it() {
    let mut offered = Offered::new(&Home::new());
    let [one, two] = &mut offered.indexes[..] else { unreachable!() };
    std::mem::swap(&mut one.head.diff_id, &mut two.head.diff_id);
    let home = Home::new();
    offered.publish(&home.store).unwrap();
    offered.fill(&home.store, 0);
    offered.fill(&home.store, 1);
    assert_eq!(offered.complete(&home), Completed::Same);
    // The layers were read.
    assert_eq!(offered.blobs.asked.lock().unwrap().len(), 3);
    assert!(home.store.fsck_deep(FsckOptions::default()).unwrap().is_sound());

    // Without the layers, nothing changes.
    let home = Home::new();
    offered.publish(&home.store).unwrap();
    offered.fill(&home.store, 0);
    offered.fill(&home.store, 1);
    let (manifest, none) = (&offered.documents.digest, Memory::default());
    let failed = complete(&home.store, &offered.id, manifest, &none, &home.environment());
    failed.unwrap_err();
    assert_eq!(home.store.presence(&offered.id).unwrap(), Presence::Partial);
}

#[test]
fn a_device_with_other_bytes_behind_its_tar_is_not_the_one_of_its_layer() {
    let mut offered = Offered::new(&Home::new());
    let right = offered.id;
    let before = offered.indexes[0].head.device;
    *offered.devices[0].last_mut().unwrap() ^= 1;
    let id: DeviceId = id_of(&offered.devices[0]).into();
    offered.indexes[0].head.device = id;
    patch(&mut offered.image, before.to_string().as_bytes(), id.to_string().as_bytes());
    set_checksum(&mut offered.image);
    offered.id = id_of(&offered.image).into();
    let home = Home::new();
    let store = &home.store;
    offered.publish(store).unwrap();
    offered.fill(store, 0);
    offered.fill(store, 1);
    assert_eq!(offered.complete(&home), Completed::Other(right));
    assert_eq!(store.presence(&right).unwrap(), Presence::Complete);
    assert!(store.fsck_deep(FsckOptions::default()).unwrap().is_sound());
    store.gc(NOW).unwrap();
    assert!(store.lazy_devices.stat(&id).unwrap().is_none());
}
