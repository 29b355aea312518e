//! `serve --lazy`, and images that are mounted before they are downloaded.

use std::fs;
use std::io::{Cursor, Read};
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use image::digest::Digest;
use kernel::verity::{Algorithm, Measured};
use oci::blobs::BlobSource;
use rustix::process::{Pid, Signal, kill_process};
use store::{OpenOptions, Origin, Seconds, Store, Trace, TraceRun, Traces, Who};
use testing::fake::wait_for;
use transfer::StoredImage;
use transfer::lazy::{
    IndexedLayer, LayerIndex, LazyImage, LazyPublishError, LazyPublished, publish,
};

use crate::container_disk::writable::{has, run};
use crate::container_life::runs::runtimes;
use crate::mounting::mounts::Unmount;
use crate::{Place, add_programs, is_root};

/// The bytes of a blob.
struct Bytes(Vec<u8>);

impl BlobSource for Bytes {
    fn blob(&self, _: &Digest, _: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        let [start, end] = [range.start, range.end].map(|it| usize::try_from(it).unwrap());
        Box::new(Cursor::new(self.0[start..end].to_vec()))
    }
}

/// A store with an image whose device is empty. The layer's blob is kept.
pub(crate) struct Lazy {
    pub(crate) place: Place,
    /// The tree that the image was made from.
    pub(crate) tree: PathBuf,
    /// Path of the blob in the store.
    pub(crate) blob: PathBuf,
}

impl Lazy {
    /// `None`, with a note, if the image cannot be mounted here.
    pub(crate) fn new() -> Option<Self> {
        crate::services::fuse_devices::can_serve().then(Self::that_is_not_mounted).flatten()
    }

    /// Like `new`, even if the image cannot be mounted here.
    fn that_is_not_mounted() -> Option<Self> {
        Self::with_image(|_| ())
    }

    /// Like `new`, with an image that was changed, so that its index is wrong.
    pub(crate) fn with_image(change: impl FnOnce(&mut Vec<u8>)) -> Option<Self> {
        Self::with(|_| (), change)
    }

    /// Like `with_image`, with more files in the image.
    pub(crate) fn with(add: impl FnOnce(&Path), change: impl FnOnce(&mut Vec<u8>)) -> Option<Self> {
        let (lazy, published) = Self::make(add, change, |_, _| ())?;
        published.unwrap();
        Some(lazy)
    }

    /// Like `with`; `before` gets the store and the image that is published next.
    pub(crate) fn make(
        add: impl FnOnce(&Path),
        change: impl FnOnce(&mut Vec<u8>),
        before: impl FnOnce(&Store, &LazyImage<'_>),
    ) -> Option<(Self, Result<LazyPublished, LazyPublishError>)> {
        if !is_root() || !testing::programs(&["tar", "gzip"]) {
            return None;
        }
        let place = Place::new();
        let tree = place.tree("tree", "x");
        add_programs(&tree, &["/bin/cat", "/usr/bin/md5sum"]);
        add(&tree);
        let words: Vec<u8> = testing::noise(1 << 20);
        let text: String = words.iter().map(|it| format!("{} ", it % 199)).collect();
        fs::write(tree.join("words"), text).unwrap();
        // The image contains data that no program reads. Without it, a trace could cover the whole device, which would
        // then be complete and no longer listed.
        fs::write(tree.join("unread"), testing::noise(4 << 20)).unwrap();
        let tar = place.path("layer.tar");
        let packed = ["-cf", tar.to_str().unwrap(), "."];
        assert!(testing::trees::run("tar", &packed, &tree));
        assert!(testing::trees::run("gzip", &["-n", "layer.tar"], &place.path(".")));
        place.out("import --quiet --form tar tar:layer.tar.gz lazy");
        fs::rename(place.path("store"), place.path("full")).unwrap();
        let bytes = fs::read(place.path("layer.tar.gz")).unwrap();
        let full = open(&place.path("full"));
        let found = full.resolve("lazy").unwrap();
        let documents = StoredImage::load(&full, &found.manifest.unwrap()).unwrap();
        let opened = full.open_image(&found.image).unwrap();
        let [device] = &opened.devices[..] else { panic!("one layer, one device") };
        let layer = IndexedLayer {
            layer: &documents.manifest.layers[0],
            diff_id: &documents.config.diff_ids()[0],
            device: &device.id,
            file: &device.file,
        };
        let blob = Bytes(bytes);
        let index = LayerIndex::new(&layer, &blob, &AtomicBool::new(false)).unwrap();
        let StoredImage { digest, manifest_bytes, manifest, config_bytes, .. } = &documents;
        let store = open(&place.path("store"));
        let file = place.path("full/images").join(found.image.to_string());
        let mut bytes = fs::read(file).unwrap();
        change(&mut bytes);
        let id = image::verity::digest(image::verity::Algorithm::Sha256, &bytes).into();
        let lazy = LazyImage {
            image: &bytes,
            id: &id,
            manifest: digest,
            documents: &[(digest, manifest_bytes), (&manifest.config.digest, config_bytes)],
            indexes: &[index],
            name: &"lazy:latest".parse().unwrap(),
            origin: &Origin { manifest: Some(*digest), repository: None },
            now: Seconds(1_700_000_000),
        };
        before(&store, &lazy);
        let published = publish(&store, &lazy);
        let kept = manifest.layers[0].digest;
        let mut partial = store.downloads.partial(&kept).unwrap().unwrap();
        partial.append(&blob.0).unwrap();
        partial.finish().unwrap();
        let hex = kept.to_string()["sha256:".len()..].to_owned();
        let mut names = walk(&place.path("store"));
        let blob = names.find(|it| it.to_string_lossy().ends_with(&hex)).unwrap();
        drop(names);
        Some((Self { place, tree, blob }, published))
    }

    fn serve(&self) -> Child {
        serve(&self.place)
    }

    /// Ends a service; if no device is in use, its keeper also ends.
    fn end(&self, mut service: Child) {
        end(&self.place, &mut service);
    }

    pub(crate) fn words(&self) -> Vec<u8> {
        fs::read(self.tree.join("words")).unwrap()
    }
}

/// Starts the service of a store, and waits until it accepts requests.
pub(crate) fn serve(place: &Place) -> Child {
    serve_with(place, &[], |command| command)
}

/// Like [`serve`], with more options, and a command that the test changes.
pub(crate) fn serve_with(
    place: &Place,
    options: &[&str],
    around: impl FnOnce(&mut Command) -> &mut Command,
) -> Child {
    let mut command = place.command(&["serve", "--lazy"]);
    around(command.args(options));
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = [0; 5];
    child.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
    assert_eq!(&line, b"fills");
    child
}

/// Ends the service of a store without mounts, and checks that its keeper also ends.
pub(crate) fn end(place: &Place, service: &mut Child) {
    // A container of another test has copies of all mounts that existed at its start.
    testing::fake::wait_for("the last mount's end", || {
        place.out("ps --lazy --json").trim() == "[]"
    });
    let pid = Pid::from_raw(service.id().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    assert!(service.wait().unwrap().success());
    // The kernel closes a device a little after its last mount has ended.
    testing::fake::wait_for("the keeper's end", || !serve_folder(place).exists());
}

#[test]
fn names_are_read_without_the_data() {
    let Some(lazy) = Lazy::that_is_not_mounted() else { return };
    let place = &lazy.place;
    let listed = place.out("ls -l lazy:/words");
    assert!(listed.contains(&fs::metadata(lazy.tree.join("words")).unwrap().len().to_string()));
    assert!(place.out("tree lazy").contains("words"));
    assert!(place.out("images").contains("lazy"));
    assert!(place.out("show lazy").contains("tar"));
    let refused = place.run("cat lazy:/words");
    assert_eq!((refused.code, &refused.out[..]), (Some(2), ""));
    assert!(refused.err.contains("data of \"/words\" is not downloaded"), "{}", refused.err);
    // Without the data, the files cannot be compared.
    let refused = place.run("diff lazy lazy:/words");
    assert_eq!(refused.code, Some(2));
}

pub(super) fn open(path: &Path) -> Store {
    Store::open(path, Who::this_process(), OpenOptions::create()).unwrap()
}

pub(crate) fn serve_folder(place: &Place) -> PathBuf {
    use std::os::unix::fs::MetadataExt as _;
    let found = fs::metadata(place.path("store")).unwrap();
    PathBuf::from(format!("/run/quire/lazy-{:x}-{}", found.dev(), found.ino()))
}

fn walk(folder: &Path) -> Box<dyn Iterator<Item = PathBuf>> {
    Box::new(fs::read_dir(folder).unwrap().flat_map(|entry| {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => walk(&path),
            false => Box::new(std::iter::once(path)) as Box<dyn Iterator<Item = PathBuf>>,
        }
    }))
}

#[test]
fn an_image_is_read_before_it_is_here() {
    let Some(lazy) = Lazy::new() else { return };
    let place = &lazy.place;
    fs::create_dir(place.path("root")).unwrap();
    let ran = place.run("mount lazy root");
    assert!(ran.code == Some(2) && ran.err.contains("mount it with --lazy"), "{}", ran.err);
    let service = lazy.serve();
    let ran = place.run("serve --lazy");
    assert!(ran.code == Some(2) && ran.err.contains("--replace"), "{}", ran.err);
    place.out("mount --lazy lazy root");
    assert!(fs::read(place.path("root/words")).unwrap() == lazy.words());
    // gc keeps an image that is in use, even without a name.
    place.out("rmi lazy");
    place.out("gc");
    let long = fs::read(place.path("root/etc/long")).unwrap();
    assert!(long == fs::read(lazy.tree.join("etc/long")).unwrap());
    place.out("umount root");
    lazy.end(service);
    place.out("gc");
    assert!(walk(&place.path("store/lazy")).next().is_none(), "the device is gone");
}

#[test]
fn mounts_start_the_service_that_they_need() {
    let Some(lazy) = Lazy::new() else { return };
    let place = &lazy.place;
    let roots = ["one", "two", "three"];
    roots.iter().for_each(|it| fs::create_dir(place.path(it)).unwrap());
    // The mounts run at the same time, but start only one service.
    let told: usize = std::thread::scope(|scope| {
        let mounts = roots.map(|root| {
            scope.spawn(move || {
                let ran = place.run(&format!("mount --lazy lazy {root}"));
                assert_eq!(ran.code, Some(0), "{}", ran.err);
                ran.err.matches("started `quire serve --lazy`").count()
            })
        });
        mounts.into_iter().map(|it| it.join().unwrap()).sum()
    });
    assert_eq!(told, 1);
    for root in roots {
        assert!(fs::read(place.path(root).join("words")).unwrap() == lazy.words());
    }
    // The service runs longer than the mounts that started it.
    let log = serve_folder(place).with_extension("log");
    assert!(log.exists());
    for root in roots {
        // If another test is starting a program, that process has copies of this one's open files until it executes
        // the program.
        wait_for("the mount is unused", || place.run(&format!("umount {root}")).code == Some(0));
    }
    let service = serve_with(place, &["--replace"], |command| command);
    lazy.end(service);
    // If the service has ended because its devices were unused, it has removed the log.
    if log.exists() {
        fs::remove_file(log).unwrap();
    }
}

#[test]
fn a_mount_says_why_no_service_starts() {
    let Some(lazy) = Lazy::new() else { return };
    let place = &lazy.place;
    fs::create_dir(place.path("root")).unwrap();
    let folder = serve_folder(place);
    fs::create_dir_all(&folder).unwrap();
    let anybody = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    fs::set_permissions(&folder, anybody).unwrap();
    let ran = place.run("mount --lazy lazy root");
    assert_eq!(ran.code, Some(2));
    let told = ["starting one failed", "others can write"];
    assert!(told.iter().all(|it| ran.err.contains(it)), "{}", ran.err);
    fs::remove_dir(&folder).unwrap();
    fs::remove_file(folder.with_extension("log")).unwrap();
}

#[test]
fn a_service_ends_when_nothing_was_in_use_for_long_enough() {
    let Some(lazy) = Lazy::new() else { return };
    let place = &lazy.place;
    fs::create_dir(place.path("root")).unwrap();
    let mut service = serve_with(place, &["--idle", "3"], |command| command);
    place.out("mount --lazy lazy root");
    std::thread::sleep(Duration::from_secs(6));
    assert!(service.try_wait().unwrap().is_none());
    assert!(fs::read(place.path("root/words")).unwrap() == lazy.words());
    place.out("umount root");
    assert!(service.wait().unwrap().success());
    wait_for("the keeper's end", || !serve_folder(place).exists());
}

/// A keeper that outlives its service, because a device is in use, removes their folder when it ends.
#[test]
fn a_keeper_leaves_nothing_behind() {
    let Some(lazy) = Lazy::new() else { return };
    let place = &lazy.place;
    fs::create_dir(place.path("root")).unwrap();
    let mut service = lazy.serve();
    place.out("mount --lazy lazy root");
    signal(service.id(), Signal::TERM);
    assert!(service.wait().unwrap().success());
    assert!(serve_folder(place).exists());
    place.out("umount root");
    wait_for("the keeper's end", || !serve_folder(place).exists());
}

#[test]
fn a_lost_source_is_an_error_that_heals() {
    let Some(lazy) = Lazy::new() else { return };
    let place = &lazy.place;
    fs::create_dir(place.path("root")).unwrap();
    let hidden = place.path("hidden");
    fs::rename(&lazy.blob, &hidden).unwrap();
    let service = lazy.serve();
    place.out("mount --lazy lazy root");
    let error = fs::read(place.path("root/words")).map(|it| it.len()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    fs::rename(&hidden, &lazy.blob).unwrap();
    // A failed fetch is retried after a second.
    let mut read = None;
    wait_for("its bytes", || {
        read = fs::read(place.path("root/words")).ok();
        read.is_some()
    });
    assert!(read == Some(lazy.words()));
    place.out("umount root");
    lazy.end(service);
}

/// The other tests have their stores on ext4.
#[test]
fn stores_on_xfs_and_btrfs_are_filled_while_they_are_read() {
    for system in ["xfs", "btrfs"] {
        let mkfs = format!("mkfs.{system}");
        if !is_root() || !has(&[&mkfs, "mount", "cp"]) {
            continue;
        }
        let Some(lazy) = Lazy::new() else { return };
        let place = &lazy.place;
        let (file, disk) = (place.path("disk"), place.path("point"));
        fs::File::create(&file).unwrap().set_len(1 << 30).unwrap();
        fs::create_dir(&disk).unwrap();
        let [from, file, at] =
            [place.path("store"), file, disk.clone()].map(|it| it.to_str().unwrap().to_owned());
        run(&mkfs, &["-q", &file]);
        run("mount", &["-o", "loop", &file, &at]);
        let guard = Unmount(disk.clone());
        run("cp", &["-a", &from, &at]);
        fs::remove_dir_all(&from).unwrap();
        std::os::unix::fs::symlink(disk.join("store"), &from).unwrap();

        let service = serve_with(place, &[], |command| command);
        fs::create_dir(place.path("root")).unwrap();
        place.out("mount --lazy lazy root");
        assert!(fs::read(place.path("root/words")).unwrap() == lazy.words(), "{system}");
        let filled = || {
            let listed = place.out("ps --lazy --json");
            let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
            (listed[0]["filled"].as_u64(), listed[0]["bytes"].as_u64())
        };
        let (some, all) = filled();
        assert!(some > Some(0) && some < all, "{system}: {some:?} of {all:?}");
        // Fetch the rest, and seal the device, while it is mounted.
        fs::create_dir(place.path("other")).unwrap();
        place.out("mount --lazy --complete lazy other");
        wait_for("all of the image", || place.out("ps --lazy --json").trim() == "[]");
        for root in ["root", "other"] {
            assert!(fs::read(place.path(root).join("words")).unwrap() == lazy.words(), "{system}");
            place.out(&format!("umount {root}"));
        }
        lazy.end(service);
        let checked = place.out("fsck --deep");
        assert!(checked.starts_with("sound: "), "{system}: {checked}");
        drop(guard);
    }
}

/// fs-verity seals the device, although the kernel has it open through the mount.
#[test]
fn a_complete_device_is_sealed_while_it_is_mounted() {
    let Some(lazy) = Lazy::new() else { return };
    let place = &lazy.place;
    let probe = place.path("probe");
    fs::write(&probe, "x").unwrap();
    if kernel::verity::enable(fs::File::open(&probe).unwrap().as_fd(), Algorithm::Sha256).is_err() {
        testing::skipped("no fs-verity on the file system of temporary files");
        return;
    }
    fs::create_dir(place.path("root")).unwrap();
    let service = lazy.serve();
    place.out("mount --lazy --complete lazy root");
    let long = fs::read(place.path("root/etc/long")).unwrap();
    wait_for("all of the image", || place.out("ps --lazy --json").trim() == "[]");
    let files = fs::read_dir(place.path("store/data")).unwrap().map(|it| it.unwrap().path());
    let devices: Vec<_> = files.filter(|it| it.extension().is_none()).collect();
    let [device] = &devices[..] else { panic!("{devices:?}") };
    let measured = kernel::verity::measure(fs::File::open(device).unwrap().as_fd()).unwrap();
    let Some(Measured::Sha256(digest)) = measured else { panic!("{measured:?}") };
    let hex: String = digest.iter().map(|it| format!("{it:02x}")).collect();
    assert_eq!(device.file_name().unwrap().to_str(), Some(&hex[..]));
    // The pages are dropped from memory, and read again.
    fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
    assert!(fs::read(place.path("root/words")).unwrap() == lazy.words());
    assert!(fs::read(place.path("root/etc/long")).unwrap() == long);
    place.out("umount root");
    lazy.end(service);
    assert!(place.out("fsck --deep").starts_with("sound"));
}

fn signal(process: u32, signal: Signal) {
    kill_process(Pid::from_raw(process.try_into().unwrap()).unwrap(), signal).unwrap();
}

#[test]
fn a_service_manager_is_told() {
    let Some(lazy) = Lazy::new() else { return };
    let place = &lazy.place;
    let manager = UnixDatagram::bind(place.path("notify")).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let told = || {
        let mut bytes = [0; 1000];
        let length = manager.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..length].to_vec()).unwrap()
    };
    let start = |options: &[&str]| {
        serve_with(place, options, |it| it.env("NOTIFY_SOCKET", place.path("notify")))
    };
    let mut first = start(&[]);
    assert_eq!(told(), "READY=1\n");
    let begun = Instant::now();
    let mut since = [Duration::ZERO; 2];
    for since in &mut since {
        signal(first.id(), Signal::HUP);
        let reload = told();
        let micros = reload.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").unwrap().trim_end();
        *since = Duration::from_micros(micros.parse().unwrap());
        assert_eq!(told(), "READY=1\n");
    }
    assert!(since[0] < since[1] && since[1] - since[0] < begun.elapsed(), "{since:?}");
    // The times are monotonic, and not the time of day.
    assert!(since[1].as_secs() < 1_000_000_000, "{since:?}");

    // The service manager does not manage a service that a keeper has started, so it starts another one.
    fs::create_dir(place.path("root")).unwrap();
    place.out("mount --lazy lazy root");
    signal(first.id(), Signal::KILL);
    first.wait().unwrap();
    assert!(fs::read(place.path("root/words")).unwrap() == lazy.words());
    let second = start(&["--replace"]);
    assert_eq!(told(), "READY=1\n");
    place.out("umount root");
    lazy.end(second);
    assert_eq!(told(), "STOPPING=1\n");
    manager.set_nonblocking(true).unwrap();
    assert_eq!(manager.recv(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn settings_are_read_at_the_start_and_again() {
    let Some(lazy) = Lazy::new() else { return };
    let place = &lazy.place;
    let write = |text: &str| fs::write(place.path("serve.toml"), text).unwrap();
    for (text, reason) in [
        ("prefetch = 3", "serve.toml, line 1: prefetch is not a string"),
        ("\nlazy_timeout = 3", "serve.toml, line 2: \"lazy_timeout\" is not a setting: use"),
    ] {
        write(text);
        let refused = place.run("serve --lazy --config serve.toml");
        assert!(refused.code == Some(2) && refused.err.contains(reason), "{}", refused.err);
    }
    let refused = place.run("serve --lazy --config none.toml");
    assert!(refused.err.contains("cannot read none.toml"), "{}", refused.err);

    // Only the service that is set to this trace fetches data.
    let store = open(&place.path("store"));
    let found = store.resolve("lazy").unwrap();
    let device = *store.lazy_devices(&found.image).unwrap().first().unwrap();
    let mut traces = Traces::default();
    let runs = vec![TraceRun { device, block: 4, blocks: 4 }];
    traces.set(Trace { name: "first".to_owned(), runs, start: None }).unwrap();
    store.downloads.set_traces(&found.image, &traces).unwrap();
    drop(store);
    fs::create_dir(place.path("root")).unwrap();
    let log = place.path("log");
    let told = |text: &str| {
        wait_for(text, || fs::read_to_string(&log).unwrap_or_default().contains(text));
    };
    let requests = || {
        let listed = place.out("ps --lazy --json");
        let status = serde_json::from_str::<serde_json::Value>(&listed).unwrap()[0].take();
        status["requests"].as_u64().unwrap()
    };
    write("prefetch = \"none\"");
    let service = serve_with(place, &["--config", "serve.toml", "--verbose"], |it| {
        it.stderr(fs::File::create(&log).unwrap())
    });
    place.out("mount --lazy lazy root");
    let before = requests();
    for (text, answer) in [
        ("prefetch = \"first\"", "read the settings again"),
        ("prefetch = \"second\"\nprefetch = 1", "keeping the previous settings"),
    ] {
        fs::write(&log, "").unwrap();
        write(text);
        signal(service.id(), Signal::HUP);
        told(answer);
    }
    assert!(fs::read_to_string(&log).unwrap().contains("serve.toml, line 2"));
    // The settings from before the mistake stay in force.
    fs::create_dir(place.path("again")).unwrap();
    place.out("mount --lazy lazy again");
    wait_for("the trace", || requests() > before);
    place.out("umount again");
    place.out("umount root");
    lazy.end(service);
}

#[test]
fn containers_run_before_their_image_is_here() {
    let Some(lazy) = Lazy::new() else { return };
    let place = &lazy.place;
    let service = lazy.serve();
    let ran = place.run("run --rm lazy cat /words");
    assert!(ran.code == Some(125) && ran.err.contains("--lazy"), "{}", ran.err);
    let words = String::from_utf8(lazy.words()).unwrap();
    for runtime in runtimes() {
        let line = format!("run --rm --lazy --runtime {runtime} lazy cat /words");
        assert!(place.out(&line) == words, "{runtime}");
        // Writes of a container stay in that container.
        let line =
            format!("run --rm --lazy --writable memory --runtime {runtime} lazy md5sum /words");
        assert!(place.out(&line).ends_with("  /words\n"), "{runtime}");
    }
    lazy.end(service);
}

#[test]
fn what_a_program_read_elsewhere_is_fetched_first() {
    let Some(lazy) = Lazy::new() else { return };
    let place = &lazy.place;
    let words = String::from_utf8(lazy.words()).unwrap();
    let Some(runtime) = runtimes().next() else { return };
    // This store represents a machine that has the complete image.
    let lazily = place.path("lazily");
    fs::rename(place.path("store"), &lazily).unwrap();
    fs::rename(place.path("full"), place.path("store")).unwrap();
    let line = format!("trace --as words --runtime {runtime} lazy cat /words");
    let traced = place.run(&line);
    assert!(traced.code == Some(0) && traced.out == words, "{}", traced.err);
    assert!(traced.err.contains("trace words of lazy: "), "{}", traced.err);
    for (wrong, reason) in [
        ("trace --as Words lazy cat /words", "not a name of a trace"),
        ("trace --as none lazy cat /words", "choose another name"),
        ("trace --detach lazy cat /words", "ends when its command does"),
        ("trace --lazy lazy cat /words", "a trace needs the whole image"),
    ] {
        let refused = place.run(wrong);
        assert!(refused.code == Some(125) && refused.err.contains(reason), "{}", refused.err);
    }
    assert_eq!(place.run("trace --as").code, Some(125));
    let failed = place.run(&format!("trace --runtime {runtime} lazy cat /none"));
    assert_eq!(failed.code, Some(1), "{}", failed.err);
    let traces =
        walk(&place.path("store/blobs")).find(|it| it.extension() == Some("traces".as_ref()));
    let traces = traces.unwrap();
    place.out("fsck");
    place.out("gc");
    assert!(traces.exists(), "it goes with the image");
    let kept = lazily.join("blobs").join(traces.file_name().unwrap());
    fs::copy(&traces, &kept).unwrap();
    fs::rename(place.path("store"), place.path("full")).unwrap();
    fs::rename(&lazily, place.path("store")).unwrap();

    let service = lazy.serve();
    let refused = place.run("run --rm --lazy --prefetch other lazy cat /words");
    assert!(refused.err.contains("has no trace \"other\""), "{}", refused.err);
    fs::create_dir(place.path("root")).unwrap();
    place.out("mount --lazy --prefetch words lazy root");
    let devices = || {
        let listed = place.out("ps --lazy --json");
        serde_json::from_str::<serde_json::Value>(&listed).unwrap()[0].take()
    };
    // The data is fetched although no program reads it.
    testing::fake::wait_for("the trace", || {
        devices()["filled"].as_u64().unwrap()
            >= fs::metadata(lazy.tree.join("words")).unwrap().len()
    });
    let device = devices();
    assert_eq!((&device["waits"], &device["failures"]), (&0.into(), &0.into()));
    assert!(device["fetched"] == device["fetchedAhead"], "{device}");
    let brought = ["needed", "prefetched"].map(|it| device[it].as_u64().unwrap());
    assert!(brought[0] == 0 && brought[1] >= device["wasted"].as_u64().unwrap(), "{device}");
    assert!(brought[1] > 0, "{device}");
    assert!(fs::read_to_string(place.path("root/words")).unwrap() == words);
    assert_eq!(devices()["waits"], 0);
    assert!(place.out("ps --lazy").contains("REQUESTS"));
    let metrics = place.out("ps --lazy --metrics");
    assert!(metrics.contains("quire_lazy_up 1\n"), "{metrics}");
    assert!(metrics.contains("quire_lazy_requests_total{device="), "{metrics}");
    place.out("umount root");
    lazy.end(service);
    assert!(place.out("ps --lazy --metrics").contains("quire_lazy_up 0\n"));
}

/// Returns the keeper of a service.
pub(crate) fn keeper_of(folder: &Path) -> Pid {
    let mut processes = fs::read_dir("/proc").unwrap();
    let found = processes.find_map(|it| {
        let path = it.unwrap().path();
        let number = path.file_name()?.to_str()?.parse().ok()?;
        let words = fs::read(path.join("cmdline")).ok()?;
        let mut words = words.split(|it| *it == 0).skip_while(|it| *it != b"--keeper");
        let is_it = words.nth(1)? == folder.as_os_str().as_encoded_bytes();
        is_it.then_some(number)
    });
    Pid::from_raw(found.unwrap()).unwrap()
}
