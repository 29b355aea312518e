//! Windows that are added after their index.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use image::digest::Digest;
use tempfile::TempDir;

use super::lazy::{Lazy, damage, device, in_lazy_devices, path};
use super::{NOW, name, open};
use crate::{IndexWindows, LazyDeviceFile};

/// Windows that came without their bytes are added later, and a crash may damage them, because they are not synced.
#[test]
fn windows_may_come_after_their_index() {
    let lazy = Lazy::new();
    let directory = TempDir::new().unwrap();
    let store = open(directory.path());
    let (id, manifest) = (lazy.id(), lazy.manifest());
    let blob = IndexWindows::Blob(Digest::sha256(b"windows"));
    let publish = || lazy.publish_with(&store, "one", manifest, blob.clone()).unwrap();
    publish();
    let windows = || store.lazy_devices.index_for(id, Some(&manifest)).unwrap().unwrap().1;
    assert!(windows() == blob);
    assert!(store.lazy_devices.index_head_for(id, Some(&manifest)).unwrap().is_some());
    assert_eq!(damage(&store), []);
    assert_eq!(in_lazy_devices(&directory).len(), 4);

    // Other windows, another manifest, and another device.
    assert!(!store.add_windows(id, &manifest, b"WINDOWS").unwrap());
    assert!(!store.add_windows(id, &Digest::sha256(b"other"), b"windows").unwrap());
    assert!(!store.add_windows(&device("b"), &manifest, b"windows").unwrap());
    assert!(windows() == blob);
    assert!(store.add_windows(id, &manifest, b"windows").unwrap());
    assert!(windows() == lazy.groups());
    // Publishing the same index again does not fetch the windows again.
    publish();
    assert!(windows() == lazy.groups());

    let file = path(&directory, LazyDeviceFile::ClaimedWindows(*id, manifest));
    for lost in [&b"\0\0\0\0\0\0\0"[..], b"", b"win"] {
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&file, lost).unwrap();
        assert!(windows() == blob);
        assert_eq!(damage(&store), []);
    }
    // A damaged digest is damage of the index, because the windows cannot be compared.
    let digest = path(&directory, LazyDeviceFile::WindowsDigest(*id, manifest));
    let right = fs::read(&digest).unwrap();
    fs::set_permissions(&digest, fs::Permissions::from_mode(0o600)).unwrap();
    for lost in [&b""[..], b"sha256:12"] {
        fs::write(&digest, lost).unwrap();
        assert!(store.lazy_devices.index_for(id, Some(&manifest)).is_err());
        assert_eq!(damage(&store).len(), 2, "the index, and the device that needs it");
    }
    fs::write(&digest, right).unwrap();
    assert!(windows() == blob);
    // A local index of the same blob has windows.
    store.put_index(&lazy.head, b"windows").unwrap();
    assert!(windows() == lazy.groups());
    for file in [LazyDeviceFile::Index(*id), LazyDeviceFile::Windows(*id)] {
        fs::remove_file(path(&directory, file)).unwrap();
    }
    assert!(windows() == blob);
    // An index that has its windows replaces the digest.
    lazy.publish(&store).unwrap();
    assert!(windows() == lazy.groups());
    let digest = LazyDeviceFile::WindowsDigest(*id, manifest);
    assert!(!path(&directory, digest).exists());
    publish();
    assert!(windows() == lazy.groups(), "they are the same windows");
    // All files of the index go with the image.
    let other = IndexWindows::Blob(Digest::sha256(b"other windows"));
    lazy.publish_with(&store, "one", manifest, other.clone()).unwrap();
    assert!(windows() == other);
    store.remove_ref(&name("one")).unwrap();
    super::eventually(|| {
        store.gc(NOW).unwrap();
        in_lazy_devices(&directory).is_empty()
    });
}
