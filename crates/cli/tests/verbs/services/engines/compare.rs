//! Layers of containers' changes, as containerd requests them.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Containerd, Engine, EnginePlace, NEWEST, engine_place, snapshotter};
use crate::Place;
use crate::container_life::commit;
use crate::container_life::commit::{python, same, tar, walk};

/// Option that requests uncompressed layers.
const TAR: &str = "--media-type application/vnd.oci.image.layer.v1.tar";

/// A container that waits, with a tree in which all kinds of files were changed.
struct Changed<'a> {
    engine: &'a Containerd,
    name: String,
    root: PathBuf,
}

impl<'a> Changed<'a> {
    fn start(engine: &'a Containerd, image: &str, name: &str) -> Self {
        engine.out(&format!("run --detach --snapshotter quire {image} {name} /bin/sleep 600"));
        let mount = engine.out(&format!("snapshot --snapshotter quire mounts /x {name}"));
        // The output is: mount -t bind ROOT /x -o rbind,rw
        let root = PathBuf::from(mount.split(' ').nth(3).unwrap());
        Self { engine, name: name.to_owned(), root }
    }

    /// Writes the layer between two snapshots to a file.
    fn layer(&self, snapshots: &str, file: &Path) {
        let line = format!("snapshot --snapshotter quire diff {TAR} {snapshots}");
        let output = self.engine.output(&line);
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        fs::write(file, output.stdout).unwrap();
    }
}

impl Drop for Changed<'_> {
    fn drop(&mut self) {
        self.engine.ctr(&format!("task kill --signal SIGKILL {}", self.name));
        self.engine.ctr(&format!("task delete --force {}", self.name));
        self.engine.ctr(&format!("container delete {}", self.name));
    }
}

/// Applies a layer to the image's tree with other programs, and returns the visible metadata.
fn applied(maker: &Place, layer: &Path) -> String {
    let tree = maker.path("applied");
    fs::create_dir(&tree).unwrap();
    let base = maker.path("base.tar");
    tar(&["-C", tree.to_str().unwrap(), "-xpf", base.to_str().unwrap()]);
    python(&["apply", layer.to_str().unwrap(), tree.to_str().unwrap()]);
    let seen = walk(&tree);
    fs::remove_dir_all(&tree).unwrap();
    seen
}

fn compares(engine: Engine, programs: &Path) {
    let Some(EnginePlace(place)) = &engine_place() else { return };
    let Some(maker) = commit::place() else { return };
    maker.out("export --quiet a docker-archive:image.tar");
    let socket = place.path("snapshotter");
    let name = format!("quire-test-{}-compare-{engine:?}", std::process::id());
    let mut service = snapshotter(place, &socket, &[]);
    let engine = Containerd::start(place, engine, programs, &socket);
    let image = maker.path("image.tar");
    engine.out(&format!("image import --snapshotter quire {}", image.display()));
    let image = engine.out("image ls -q");
    let changed = Changed::start(&engine, image.trim(), &name);
    python(&["change", changed.root.to_str().unwrap()]);
    let expect = walk(&changed.root);
    let ours = maker.path("ours.tar");
    changed.layer(&name, &ours);
    same(&applied(&maker, &ours), &expect, "ours");
    drop(changed);
    assert!(service.end().success());
}

#[test]
fn the_newest_containerd_compares_roots() {
    let Some(containerd) = testing::built(NEWEST, "containerd", "containerd") else { return };
    compares(Engine::NewestWithDiffer, containerd.parent().unwrap());
}
