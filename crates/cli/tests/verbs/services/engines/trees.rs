//! Layers whose trees differ between the service and containerd's overlayfs: the rows of the table in
//! docs/engines.md.

use std::collections::BTreeMap;

use super::*;

/// The trees of an image.
struct Shown {
    image: &'static str,
    /// Tree in containerd's overlayfs.
    overlayfs: &'static str,
    /// Tree in the service, as differ and snapshotter.
    differ: &'static str,
    /// Tree in the service if the engine unpacks.
    unpacked: &'static str,
}

const REFUSED: &str = "refused";

/// The images that trees.py makes.
const IMAGES: [Shown; 8] = [
    Shown {
        image: "link",
        overlayfs: "etc/g=old lib/foo=n usr/lib/old=o",
        differ: "etc/g=old lib->usr/lib usr/lib/foo=n usr/lib/old=o",
        unpacked: "etc/g=old lib->usr/lib usr/lib/foo=n usr/lib/old=o",
    },
    Shown {
        image: "root",
        overlayfs: "etc/g=old usr/lib/old=o x/etc/g=new",
        differ: "etc/g=new usr/lib/old=o x->/",
        unpacked: "etc/g=new usr/lib/old=o x->/",
    },
    Shown {
        image: "whiteout",
        overlayfs: "etc/g=old lib/ usr/lib/old=o",
        differ: "etc/g=old lib->usr/lib usr/lib/",
        unpacked: "etc/g=old lib->usr/lib usr/lib/",
    },
    Shown {
        image: "opaque",
        overlayfs: "etc/g=old lib/foo=n usr/lib/old=o",
        differ: "etc/g=old lib->usr/lib usr/lib/foo=n",
        unpacked: "etc/g=old lib->usr/lib usr/lib/foo=n",
    },
    Shown {
        image: "hard-link",
        overlayfs: REFUSED,
        differ: "etc/g=old lib->usr/lib usr/lib/foo=old usr/lib/old=o",
        unpacked: "etc/g=old lib->usr/lib usr/lib/foo=old usr/lib/old=o",
    },
    Shown {
        image: "both",
        overlayfs: REFUSED,
        differ: "etc/g=old q=n usr/lib/old=o",
        unpacked: "etc/g=old usr/lib/old=o",
    },
    Shown {
        image: "file",
        overlayfs: "a/b=n etc/g=old usr/lib/old=o",
        differ: "a/b=n etc/g=old usr/lib/old=o",
        unpacked: REFUSED,
    },
    Shown {
        image: "dangling",
        overlayfs: "a/b=n etc/g=old usr/lib/old=o",
        differ: "a/b=n etc/g=old usr/lib/old=o",
        unpacked: "a->nowhere etc/g=old nowhere/b=n usr/lib/old=o",
    },
];

/// Lists files with their bytes, symlinks with their targets, and empty directories.
fn list(folder: &Path, path: &str, found: &mut Vec<String>) {
    let mut is_empty = true;
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let (at, name) = (entry.path(), entry.file_name().into_string().unwrap());
        // In a directory that is only in one layer, overlayfs also lists whiteouts.
        let Ok(metadata) = entry.metadata() else { continue };
        is_empty = false;
        let (kind, inner) = (metadata.file_type(), format!("{path}{name}"));
        if kind.is_dir() {
            list(&at, &format!("{inner}/"), found);
        } else if kind.is_symlink() {
            found.push(format!("{inner}->{}", fs::read_link(at).unwrap().display()));
        } else {
            found.push(format!("{inner}={}", fs::read_to_string(at).unwrap()));
        }
    }
    if is_empty {
        found.push(path.to_owned());
    }
}

/// Returns the tree of a view of this snapshot.
fn viewed(place: &Place, engine: &Containerd, snapshotter: &str, snapshot: &str) -> String {
    let point = place.path("view");
    fs::create_dir_all(&point).unwrap();
    let target = point.display();
    let call = format!("snapshot --snapshotter {snapshotter}");
    let mut found = Vec::new();
    // The view is not referenced, so the engine may remove it before it is mounted. Then the mount fails, or its path
    // is empty. No tree of the table is empty.
    wait_for("a view is mounted", || {
        engine.ctr(&format!("{call} rm view"));
        let mount = engine.ctr(&format!("{call} view --target {target} view {snapshot}"));
        let mut sh = Command::new("sh");
        if mount.code != Some(0)
            || !sh.args(["-euc", &mount.out]).output().unwrap().status.success()
        {
            return false;
        }
        found.clear();
        list(&point, "", &mut found);
        // If another test is starting a program, that process has copies of this one's open files until it executes
        // the program.
        kernel::mount::unmount(&point, kernel::mount::Unmount::Lazy).unwrap();
        found.iter().any(|it| !it.is_empty())
    });
    found.sort();
    engine.ctr(&format!("{call} rm view"));
    found.join(" ")
}

fn trees_are_those_of_the_table(engine: Engine, programs: &Path) {
    let Some(EnginePlace(place)) = &engine_place() else { return };
    let Some(python) = testing::program("python3") else { return };
    let mut command = Command::new(python);
    command.args(["-c", include_str!("trees.py")]).arg(place.folder.path());
    let made = Ran::from_output(&command.output().unwrap());
    assert_eq!(made.code, Some(0), "{}", made.err);
    let chains: BTreeMap<_, _> = made.out.lines().map(|it| it.split_once(' ').unwrap()).collect();
    assert_eq!(chains.len(), IMAGES.len());
    let is_differ = matches!(engine, Engine::NewestWithDiffer);
    let socket = place.path("snapshotter");
    let mut service = snapshotter(place, &socket, &[]);
    let engine = Containerd::start(place, engine, programs, &socket);
    for it in &IMAGES {
        let quires = if is_differ { it.differ } else { it.unpacked };
        for (snapshotter, expected) in [("overlayfs", it.overlayfs), ("quire", quires)] {
            let archive = place.path(&format!("{}.tar", it.image));
            // In this configuration, the transfer service only knows the snapshotter `quire`.
            let way = if is_differ && snapshotter != "quire" { "--local " } else { "" };
            let line = format!("--snapshotter {snapshotter} {}", archive.display());
            let shown = match engine.ctr(&format!("image import {way}{line}")).code {
                Some(0) => viewed(place, &engine, snapshotter, chains[it.image]),
                _ => REFUSED.to_owned(),
            };
            assert_eq!(shown, expected, "{} by {snapshotter}", it.image);
        }
    }
    assert!(service.end().success());
}

#[test]
fn an_engine_that_unpacks_gives_other_trees() {
    let Some(containerd) = testing::package("containerd") else { return };
    trees_are_those_of_the_table(Engine::Debians, containerd.parent().unwrap());
}

#[test]
fn the_differ_gives_other_trees_than_overlayfs() {
    let Some(containerd) = testing::built(NEWEST, "containerd", "containerd") else { return };
    trees_are_those_of_the_table(Engine::NewestWithDiffer, containerd.parent().unwrap());
}
