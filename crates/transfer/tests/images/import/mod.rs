//! Tests complete imports, each into a separate store.

mod bombs;
mod made_of;
mod packed;
mod pipes;
mod refusals;
mod running;
mod same_image;
mod sources;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::home::{Home, usual_wishes};
use image::tree::{Content, Node};
use image::verity::ImageId;
use quire_transfer as transfer;

use oci::source::ImageSource;
use store::Digest;
use testing::chain;
use transfer::import::{ImportContext, ImportError, ImportOptions, Report};

impl Home {
    /// Imports `KIND:NAME`, where the name is that of a file in the temporary directory.
    fn import(&self, kind: &str, name: &str) -> Result<Report, ImportError> {
        self.import_with(kind, name, &usual_wishes())
    }

    fn import_with(
        &self,
        kind: &str,
        name: &str,
        options: &ImportOptions<'_>,
    ) -> Result<Report, ImportError> {
        transfer::import::import(
            &self.store,
            &self.source(kind, name),
            &self.environment(),
            options,
        )
    }

    fn import_in(
        &self,
        kind: &str,
        name: &str,
        environment: &ImportContext<'_>,
    ) -> Result<Report, ImportError> {
        let source = self.source(kind, name);
        transfer::import::import(&self.store, &source, environment, &usual_wishes())
    }

    fn source(&self, kind: &str, name: &str) -> ImageSource {
        let text = format!("{kind}:{}", self.path(name).display());
        ImageSource::parse(OsStr::new(&text)).unwrap()
    }

    /// Returns all files of the store with their lengths. Numbers in the names of temporary files are left out.
    fn files(&self) -> BTreeMap<String, u64> {
        fn add(directory: &Path, name: &str, files: &mut BTreeMap<String, u64>) {
            for entry in fs::read_dir(directory).unwrap() {
                let entry = entry.unwrap();
                let name = format!("{name}/{}", entry.file_name().to_str().unwrap());
                let metadata = entry.metadata().unwrap();
                if metadata.is_dir() {
                    add(&entry.path(), &name, files);
                } else {
                    files.insert(name, metadata.size());
                }
            }
        }
        let mut files = BTreeMap::new();
        add(&self.path("store"), "", &mut files);
        files
    }

    /// Returns the dump of an image.
    fn dump(&self, id: &ImageId) -> String {
        let mut dump = Vec::new();
        let (tree, links) = (self.tree(id), image::dump::Links::ToOwner);
        image::dump::write(&tree, links, image::dump::directory_size, &mut dump).unwrap();
        String::from_utf8(dump).unwrap()
    }

    /// Returns every path of an image with its content or type.
    fn show(&self, id: &ImageId) -> String {
        let tree = self.tree(id);
        let mut all = Vec::new();
        let mut walk = tree.walk();
        while let Some((path, entry)) = walk.next() {
            let path = String::from_utf8(path[1..].to_vec()).unwrap();
            all.push(match entry.inode.node() {
                Node::Directory => format!("{path}/"),
                Node::Symlink(target) => format!("{path}->{}", target.escape_ascii()),
                Node::Regular(Content::Inline(bytes)) => {
                    format!("{path}={}", bytes.escape_ascii())
                }
                Node::Regular(Content::External { object, .. }) => {
                    let mut file = self.store.object(&object.unwrap()).unwrap();
                    let mut bytes = Vec::new();
                    file.read_to_end(&mut bytes).unwrap();
                    format!("{path}={}*{}", bytes[0].escape_ascii(), bytes.len())
                }
                other => format!("{path}:{other:?}"),
            });
        }
        all.join(" ")
    }

    /// Returns a layer's tar, rebuilt from its recipe.
    fn rebuilt(&self, diff_id: &Digest) -> Vec<u8> {
        let mut tar = Vec::new();
        self.store.layer_tar(diff_id).unwrap().read_to_end(&mut tar).unwrap();
        tar
    }
}
