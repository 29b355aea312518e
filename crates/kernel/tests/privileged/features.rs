//! The probes behind `quire doctor`, on this kernel.

use std::fs;
use std::os::fd::AsFd as _;

use kernel::features::{Can, probe};
use kernel::process::Who;

use crate::stage::{Stage, is_before, mountinfo, open_directory};

#[test]
fn probing_answers_and_leaves_nothing() {
    let Some(stage) = Stage::new(&[]) else { return };
    let directory = stage.dir("directory");
    let before = mountinfo("");
    let features = probe(open_directory(&directory).as_fd(), Who::this_process());
    for (name, feature) in features.rows() {
        println!("{name}: {:?}: {}", feature.can, feature.reason);
        assert!(!feature.reason.is_empty());
        assert_ne!(feature.can, Can::Unknown, "{name}: {}", feature.reason);
    }
    println!("cgroups: {}", features.cgroups);
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert_eq!(features.release, release.trim_end());
    assert_eq!(mountinfo(""), before);
    assert_eq!(fs::read_dir(directory).unwrap().count(), 0);

    // The features on which other tests rely must agree with the behaviour of those tests.
    if stage.backs_files() {
        assert_eq!(features.erofs_from_file.can, Can::Yes, "{}", features.erofs_from_file.reason);
    }
    assert_eq!(features.overlay_data_layers.can, Can::Yes);
    let ordinary = features.overlay_data_layers.reason.contains("ordinary");
    assert_eq!(ordinary, is_before(6, 5), "{}", features.overlay_data_layers.reason);
    assert_eq!(features.overlay_by_descriptor.can == Can::Yes, !is_before(6, 15));
}

#[test]
fn tmpfs_gives_other_answers() {
    let Some(stage) = Stage::new(&[]) else { return };
    let options = kernel::mount::TmpfsOptions { name: "t", bytes: None, inodes: None, mode: 0o755 };
    kernel::mount::tmpfs(&options).unwrap().attach_at(&stage.dir("at")).unwrap();
    let features = probe(open_directory(&stage.path("at")).as_fd(), Who::this_process());
    assert_eq!(features.erofs_from_file.can, Can::No);
    assert!(features.erofs_from_file.reason.contains("loop"));
    assert_eq!(features.fs_verity.can, Can::No);
    assert_eq!(features.pre_content_events.can, Can::No);
    let cgroup2 = fs::read_to_string("/proc/mounts").unwrap();
    let mounts = |path: &str, kind: &str| cgroup2.contains(&format!(" {path} {kind} "));
    let expect = if mounts("/sys/fs/cgroup", "cgroup2") {
        kernel::features::Cgroups::V2
    } else if mounts("/sys/fs/cgroup/unified", "cgroup2") {
        kernel::features::Cgroups::Hybrid
    } else if mounts("/sys/fs/cgroup", "tmpfs") {
        kernel::features::Cgroups::V1
    } else {
        kernel::features::Cgroups::Absent
    };
    assert_eq!(features.cgroups, expect);
}
