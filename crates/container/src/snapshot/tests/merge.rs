//! Merged snapshots. The kernel decides whether they mean the same: both are mounted, and the trees are compared.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};

use kernel::mount::{
    Credentials, Detached, Durability, OverlayOptions, Upper, Verity, XattrNamespace, overlay,
};

use super::*;

/// A folder with an image, and with upper layers of overlays above it.
struct Layers {
    folder: tempfile::TempDir,
    namespace: XattrNamespace,
    /// Uppermost first.
    layers: Vec<PathBuf>,
}

impl Layers {
    fn new(namespace: XattrNamespace, image: impl Fn(&Path)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["image", "data"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        image(&folder.path().join("image"));
        Self { folder, namespace, layers: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Mounts layers above the image.
    fn mount(&self, layers: &[PathBuf], upper: Option<(&File, &File)>) -> Detached {
        let lower: Vec<_> = layers.iter().map(|it| File::open(it).unwrap()).collect();
        let image = File::open(self.path("image")).unwrap();
        let lower: Vec<BorrowedFd<'_>> =
            lower.iter().chain([&image]).map(|it| it.as_fd()).collect();
        // With a data layer, files are copied up without their data.
        let data = File::open(self.path("data")).unwrap();
        let data = [data.as_fd()];
        let has_data = self.namespace == XattrNamespace::Trusted;
        let options = OverlayOptions {
            name: "test",
            lower: &lower,
            data: if has_data { &data } else { &[] },
            upper: upper.map(|(upper, work)| Upper {
                upper: upper.as_fd(),
                work: work.as_fd(),
                durability: Durability::Volatile,
            }),
            verity: Verity::Off,
            xattrs: self.namespace,
            credentials: Credentials::Mounter,
        };
        overlay(&options).unwrap()
    }

    /// Changes the root by an overlay, whose upper layer becomes the uppermost snapshot.
    fn change(&mut self, change: impl Fn(&Path)) {
        let number = self.layers.len();
        let [upper, work] = ["upper", "work"].map(|it| self.path(&format!("{it}{number}")));
        for path in [&upper, &work] {
            fs::create_dir(path).unwrap();
        }
        let [upper_file, work] = [&upper, &work].map(|it| File::open(it).unwrap());
        let mount = self.mount(&self.layers, Some((&upper_file, &work)));
        change(&path_of(&mount));
        // A snapshot is a copy of the upper layer.
        let snapshot = self.path(&format!("snapshot{number}"));
        fs::create_dir(&snapshot).unwrap();
        copy_of(&upper, &snapshot).unwrap().at_rest().unwrap();
        self.layers.insert(0, snapshot);
    }

    fn merge(&self, layers: &[PathBuf], name: &str, how: Share) -> (PathBuf, CopyReport) {
        let merged = self.path(name);
        fs::create_dir(&merged).unwrap();
        let layers: Vec<_> = layers.iter().map(|it| File::open(it).unwrap()).collect();
        let layers: Vec<_> = layers.iter().map(|it| it.as_fd()).collect();
        let to = File::open(&merged).unwrap();
        let report = merge(&layers, to.as_fd(), how, self.namespace, &GO_ON).unwrap();
        (merged, report)
    }

    fn tree(&self, layers: &[PathBuf]) -> BTreeMap<PathBuf, super::Seen> {
        let mount = self.mount(layers, None);
        let mut tree = tree(&path_of(&mount));
        for seen in tree.values_mut() {
            // The numbers of links in layers differ.
            seen.links = 0;
        }
        tree
    }

    /// Merges all snapshots, and the lower ones, and compares.
    fn check(&self, what: &str) {
        println!("{what}");
        let expect = self.tree(&self.layers);
        for (number, how) in [Share::Copy, Share::Link].into_iter().enumerate() {
            let (merged, report) = self.merge(&self.layers, &format!("all{number}"), how);
            assert_equal(
                &expect,
                &self.tree(std::slice::from_ref(&merged)),
                &format!("{what}, {how:?}"),
            );
            let entries = u64::try_from(super::tree(&merged).len()).unwrap() - 1;
            assert_eq!(report.entries, entries, "{what}");
            if let [top, lower @ ..] = &*self.layers
                && !lower.is_empty()
            {
                let (merged, _) = self.merge(lower, &format!("lower{number}"), how);
                let tree = self.tree(&[top.clone(), merged]);
                assert_equal(&expect, &tree, &format!("{what}, lower ones, {how:?}"));
            }
        }
    }
}

#[track_caller]
fn assert_equal(
    expect: &BTreeMap<PathBuf, super::Seen>,
    found: &BTreeMap<PathBuf, super::Seen>,
    what: &str,
) {
    let differs = |one: &BTreeMap<PathBuf, super::Seen>, other: &BTreeMap<PathBuf, super::Seen>| {
        let differs = one.iter().filter(|(name, seen)| other.get(*name) != Some(seen));
        differs.map(|(name, seen)| (name.clone(), seen.clone())).collect::<BTreeMap<_, _>>()
    };
    assert_eq!(differs(expect, found), differs(found, expect), "{what}");
}

/// An image with directories and files.
fn image(at: &Path) {
    for directory in ["d0/d1/d2", "d1/d0", "d2"] {
        fs::create_dir_all(at.join(directory)).unwrap();
        let mut path = PathBuf::new();
        for name in Path::new(directory) {
            path.push(name);
            for file in ["f0", "f1"] {
                let text = format!("image {}", path.display());
                fs::write(at.join(&path).join(file), text.repeat(2000)).unwrap();
            }
        }
    }
    fs::hard_link(at.join("d0/f0"), at.join("d0/f3")).unwrap();
    symlink("target", at.join("d0/f2")).unwrap();
}

fn namespaces() -> impl Iterator<Item = XattrNamespace> {
    is_root().then_some([XattrNamespace::Trusted, XattrNamespace::User]).into_iter().flatten()
}

#[test]
fn each_mark_is_merged() {
    type Change = fn(&Path);
    let chains: &[(&str, &[Change])] = &[
        ("nothing", &[|_| ()]),
        ("whiteout", &[|at| fs::remove_file(at.join("d0/f0")).unwrap(), |_| ()]),
        (
            "whiteout of a new file",
            &[
                |at| fs::write(at.join("d0/new"), "new").unwrap(),
                |at| fs::remove_file(at.join("d0/new")).unwrap(),
            ],
        ),
        (
            "file after a whiteout",
            &[
                |at| fs::remove_file(at.join("d0/f0")).unwrap(),
                |at| fs::write(at.join("d0/f0"), "new").unwrap(),
            ],
        ),
        (
            "opaque directory",
            &[
                |at| fs::remove_dir_all(at.join("d0")).unwrap(),
                |at| {
                    fs::create_dir_all(at.join("d0/d1")).unwrap();
                    fs::write(at.join("d0/d1/f9"), "new").unwrap();
                },
                |at| fs::remove_file(at.join("d0/d1/f9")).unwrap(),
            ],
        ),
        (
            "files in an opaque directory",
            &[
                |at| {
                    fs::remove_dir_all(at.join("d0")).unwrap();
                    fs::create_dir_all(at.join("d0/d1")).unwrap();
                },
                |at| fs::write(at.join("d0/d1/f9"), "new").unwrap(),
            ],
        ),
        (
            "file instead of a directory",
            &[
                |at| fs::write(at.join("d0/d1/f9"), "new").unwrap(),
                |at| {
                    fs::remove_dir_all(at.join("d0")).unwrap();
                    fs::write(at.join("d0"), "file").unwrap();
                },
            ],
        ),
        (
            "directory instead of a file",
            &[
                |at| {
                    fs::remove_dir_all(at.join("d0")).unwrap();
                    fs::write(at.join("d0"), "file").unwrap();
                },
                |at| {
                    fs::remove_file(at.join("d0")).unwrap();
                    fs::create_dir_all(at.join("d0/d1")).unwrap();
                },
            ],
        ),
        (
            "metadata",
            &[
                |at| {
                    fs::set_permissions(at.join("d0/f0"), fs::Permissions::from_mode(0o600))
                        .unwrap();
                },
                |at| set(&at.join("d0/f0"), "user.x", b"1"),
                |at| {
                    fs::set_permissions(at.join("d0/f0"), fs::Permissions::from_mode(0o601))
                        .unwrap();
                },
            ],
        ),
        (
            "metadata of a new file",
            &[
                |at| fs::write(at.join("d0/new"), "new ".repeat(5000)).unwrap(),
                |at| {
                    fs::set_permissions(at.join("d0/new"), fs::Permissions::from_mode(0o600))
                        .unwrap();
                },
            ],
        ),
        (
            "data after metadata",
            &[
                |at| {
                    fs::set_permissions(at.join("d0/f0"), fs::Permissions::from_mode(0o600))
                        .unwrap();
                },
                |at| {
                    let file = File::options().write(true).open(at.join("d0/f0")).unwrap();
                    file.write_all_at(b"data", 10).unwrap();
                },
                |at| {
                    fs::set_permissions(at.join("d0/f0"), fs::Permissions::from_mode(0o700))
                        .unwrap();
                },
            ],
        ),
        (
            "metadata, then a new name",
            &[
                |at| {
                    fs::set_permissions(at.join("d0/f0"), fs::Permissions::from_mode(0o600))
                        .unwrap();
                },
                |at| rustix::fs::rename(at.join("d0/f0"), at.join("d2/f9")).unwrap(),
                |at| {
                    fs::set_permissions(at.join("d2/f9"), fs::Permissions::from_mode(0o700))
                        .unwrap();
                },
            ],
        ),
        (
            "hard link",
            &[
                |at| fs::hard_link(at.join("d0/f1"), at.join("d2/f9")).unwrap(),
                |at| fs::hard_link(at.join("d2/f9"), at.join("d2/f8")).unwrap(),
            ],
        ),
    ];
    let renames: &[(&str, &[Change])] = &[
        (
            "renamed directory",
            &[
                |at| rustix::fs::rename(at.join("d0"), at.join("moved")).unwrap(),
                |at| fs::write(at.join("moved/d1/f9"), "new").unwrap(),
                |at| fs::remove_file(at.join("moved/d1/f0")).unwrap(),
            ],
        ),
        (
            "renamed twice",
            &[
                |at| rustix::fs::rename(at.join("d0"), at.join("moved")).unwrap(),
                |at| rustix::fs::rename(at.join("moved"), at.join("d1/moved")).unwrap(),
                |at| rustix::fs::rename(at.join("d1/moved/d1"), at.join("d9")).unwrap(),
            ],
        ),
        (
            "renamed, and a new one",
            &[
                |at| rustix::fs::rename(at.join("d0/d1"), at.join("d0/d5")).unwrap(),
                |at| {
                    fs::create_dir(at.join("d0/d1")).unwrap();
                    rustix::fs::rename(at.join("d0/d5/d2"), at.join("d0/d1/d2")).unwrap();
                },
                |at| fs::remove_dir_all(at.join("d0/d5")).unwrap(),
            ],
        ),
        (
            "parent renamed after its child",
            &[
                |at| rustix::fs::rename(at.join("d0/d1/d2"), at.join("d0/d1/d7")).unwrap(),
                |at| rustix::fs::rename(at.join("d0/d1"), at.join("d0/d8")).unwrap(),
                |at| rustix::fs::rename(at.join("d0"), at.join("d2/d9")).unwrap(),
                |at| rustix::fs::rename(at.join("d2/d9/d8/d7"), at.join("d1/d0/d6")).unwrap(),
            ],
        ),
        (
            "into an opaque directory",
            &[
                |at| {
                    fs::remove_dir_all(at.join("d1")).unwrap();
                    fs::create_dir(at.join("d1")).unwrap();
                },
                |at| rustix::fs::rename(at.join("d0/d1"), at.join("d1/d1")).unwrap(),
                |at| fs::write(at.join("d1/d1/d2/f9"), "new").unwrap(),
            ],
        ),
        (
            "renamed, then its metadata",
            &[
                |at| rustix::fs::rename(at.join("d0/d1"), at.join("d3")).unwrap(),
                |at| {
                    fs::set_permissions(at.join("d3/f0"), fs::Permissions::from_mode(0o600))
                        .unwrap();
                },
                |at| rustix::fs::rename(at.join("d3"), at.join("d0/d1")).unwrap(),
            ],
        ),
    ];
    for namespace in namespaces() {
        let all = chains.iter().chain(match namespace {
            XattrNamespace::Trusted => renames,
            // The kernel refuses to rename directories of lower layers.
            XattrNamespace::User => &[],
        });
        for (what, changes) in all {
            let mut layers = Layers::new(namespace, image);
            for change in *changes {
                layers.change(change);
            }
            layers.check(&format!("{what}, {namespace:?}"));
        }
    }
}

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

fn act(at: &Path, random: &mut Random) {
    let directory = |random: &mut Random| {
        let mut path = at.to_owned();
        for _ in 0..random.below(4) {
            path.push(format!("d{}", random.below(3)));
        }
        path
    };
    let file = |random: &mut Random| {
        let name = format!("f{}", random.below(4));
        directory(random).join(name)
    };
    let below = |random: &mut Random| {
        let name = format!("d{}", random.below(3));
        directory(random).join(name)
    };
    let (one, other) = (file(random), file(random));
    let (place, second) = (below(random), below(random));
    let text =
        format!("{} ", random.below(1000)).repeat(1 + usize::try_from(random.below(3000)).unwrap());
    let mode = |path: &Path, random: &mut Random| {
        let mode = 0o700 + u32::try_from(random.below(64)).unwrap();
        fs::symlink_metadata(path).and_then(|it| {
            if it.is_symlink() {
                Ok(())
            } else {
                fs::set_permissions(path, fs::Permissions::from_mode(mode))
            }
        })
    };
    let exchange = |one: &Path, other: &Path| {
        let flags = rustix::fs::RenameFlags::EXCHANGE;
        rustix::fs::renameat_with(rustix::fs::CWD, one, rustix::fs::CWD, other, flags)
    };
    // Some fail, because the name does not exist or is another kind of file.
    let _may_fail = match random.below(17) {
        0 => fs::write(&one, text),
        1 => File::options().append(true).open(&one).and_then(|it| it.write_all_at(b"x", 0)),
        2 | 3 => mode(&one, random),
        4 => mode(&place, random),
        5 => fs::remove_file(&one),
        6 => fs::remove_dir_all(&place),
        7 | 8 => fs::create_dir_all(&place),
        9 => fs::hard_link(&one, &other),
        10 => rustix::fs::rename(&one, &other).map_err(Into::into),
        11..=13 => rustix::fs::rename(&place, &second).map_err(Into::into),
        14 => exchange(&place, &second).map_err(Into::into),
        15 => exchange(&one, &place).map_err(Into::into),
        _ => symlink("target", &one),
    };
}

#[test]
fn random_chains_mean_the_same_when_merged() {
    for namespace in namespaces() {
        for round in 0..testing::rounds(25) {
            let mut layers = Layers::new(namespace, image);
            let mut random = Random(round);
            for _ in 0..2 + round % 4 {
                let operations = 1 + random.below(60);
                let random = std::cell::RefCell::new(&mut random);
                layers.change(|at| {
                    for _ in 0..operations {
                        act(at, &mut random.borrow_mut());
                    }
                });
            }
            layers.check(&format!("round {round}, {namespace:?}"));
        }
    }
}

/// Without their data, files cannot be merged.
#[test]
fn a_file_that_lost_its_data_is_an_error() {
    if !is_root() {
        return;
    }
    let layers = Layers::new(XattrNamespace::Trusted, image);
    let [top, low, to] = ["top", "low", "to"].map(|it| layers.path(it));
    for path in [&top, &low, &to] {
        fs::create_dir(path).unwrap();
    }
    fs::write(top.join("file"), "").unwrap();
    set(&top.join("file"), "trusted.overlay.metacopy", b"");
    device(&low.join("file"), 0);
    let [top, low, to] = [top, low, to].map(|it| File::open(it).unwrap());
    let merged = |layers: &[BorrowedFd<'_>]| {
        merge(layers, to.as_fd(), Share::Copy, XattrNamespace::Trusted, &GO_ON)
    };
    let error = merged(&[top.as_fd(), low.as_fd()]).unwrap_err();
    assert!(matches!(&error, MergeError::NoData(path) if path == b"/file"), "{error}");
    let too_many = vec![top.as_fd(); MOST_LAYERS + 1];
    assert!(matches!(merged(&too_many), Err(MergeError::TooMany(65))));
    assert!(matches!(merged(&[]), Err(MergeError::TooMany(0))));
    for redirect in ["/a/../b", "..", "a/b", "/", "/a//b"] {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("d")).unwrap();
        set(&folder.path().join("d"), "trusted.overlay.redirect", redirect.as_bytes());
        let layer = File::open(folder.path()).unwrap();
        let error = merged(&[layer.as_fd(), low.as_fd()]).unwrap_err().to_string();
        assert!(error.starts_with("cannot follow the redirect of \"/d\""), "{redirect}: {error}");
    }
}

#[test]
fn directories_of_any_depth_are_merged() {
    use rustix::fs::{Mode, OFlags, mkdirat, openat};

    const DEPTH: u64 = 300;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let name = "d".repeat(200);
    let pair = Pair::new();
    let deep = |path: &Path, file: &str| {
        let mut here = openat(rustix::fs::CWD, path, flags, Mode::empty()).unwrap();
        for _ in 0..DEPTH {
            let file = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
            openat(&here, "z", file, Mode::RUSR).unwrap();
            mkdirat(&here, &name, Mode::RWXU).unwrap();
            here = openat(&here, &name, flags, Mode::empty()).unwrap();
        }
        mkdirat(&here, file, Mode::RWXU).unwrap();
    };
    let lower = pair.folder.path().join("lower");
    fs::create_dir(&lower).unwrap();
    deep(&pair.from, "upper");
    deep(&lower, "lower");
    let [from, lower, to] = [&pair.from, &lower, &pair.to].map(|it| File::open(it).unwrap());
    let layers = [from.as_fd(), lower.as_fd()];
    let report = merge(&layers, to.as_fd(), Share::Copy, XattrNamespace::User, &GO_ON).unwrap();
    assert_eq!(report.entries, 2 * DEPTH + 2);
    let mut here = openat(&to, ".", flags, Mode::empty()).unwrap();
    for _ in 0..DEPTH {
        here = openat(&here, &name, flags, Mode::empty()).unwrap();
    }
    for name in ["upper", "lower"] {
        openat(&here, name, flags, Mode::empty()).unwrap();
    }
    // No image has a path of more than 4095 bytes, so a longer one need not be known. Otherwise, the paths of all levels
    // would take memory that grows with the square of the depth.
    let mut here = openat(&to, ".", flags, Mode::empty()).unwrap();
    let mut opaque = Vec::new();
    for level in 1..=DEPTH {
        here = openat(&here, &name, flags, Mode::empty()).unwrap();
        let mark = rustix::fs::fgetxattr(&here, "user.overlay.opaque", &mut [0; 1][..]);
        if mark.is_ok() {
            opaque.push(level);
        }
    }
    assert_eq!(opaque, [4095 / 201 + 1]);
}
