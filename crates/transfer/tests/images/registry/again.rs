//! Tests pulls of images that the store has already.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use quire_transfer::pull::{Layers, Pulled};

use super::pulls::{MANIFEST, Served, image, layer, served};
use super::*;
use crate::home::Home;
use testing::fake::{Server, reply};

/// Returns each file of a store with its modification time.
fn files(folder: &Path) -> BTreeMap<PathBuf, (u64, SystemTime)> {
    let mut all = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let stat = path.symlink_metadata().unwrap();
            all.insert(path.clone(), (stat.len(), stat.modified().unwrap()));
            if stat.is_dir() {
                folders.push(path);
            }
        }
    }
    all
}

/// Returns the requests of a second pull of an image, which may be part of an index.
fn asked_again(served: &Arc<Served>, index: Option<String>, layers: Layers) -> Vec<String> {
    let truth = Arc::clone(served);
    let server = Server::start(move |request, _| match &index {
        Some(index) if request.path.ends_with("/manifests/1") => reply(200).body(index),
        _ => truth.answer(request),
    });
    let home = Home::new();
    let first = image(home.pull_as(&server.host(), layers));
    let before = (server.lines().len(), files(home.folder.path()));
    match home.pull_as(&server.host(), layers) {
        Ok(Pulled::UpToDate { image, .. }) => assert_eq!(image, first),
        other => panic!("{other:?}"),
    }
    assert_eq!(files(home.folder.path()), before.1, "nothing is written");
    server.lines().split_off(before.0)
}

#[test]
fn what_is_here_is_asked_for_once_and_not_written() {
    let served = Arc::new(served(vec![layer("a", 100_000), layer("b", 10_000)]));
    let index = format!(
        r#"{{"schemaVersion":2,"manifests":[{{"mediaType":"{MANIFEST}","digest":"{}","size":{},"platform":{{"os":"linux","architecture":"amd64"}}}}]}}"#,
        digest(&served.manifest),
        served.manifest.len()
    );
    for layers in [Layers::Forget, Layers::Keep] {
        for index in [None, Some(index.clone())] {
            assert_eq!(asked_again(&served, index, layers), ["GET /v2/app/manifests/1"]);
        }
    }
}

#[test]
fn kept_layers_are_fetched_where_one_is_missing() {
    let served = Arc::new(served(vec![layer("a", 100_000), layer("b", 10_000)]));
    let truth = Arc::clone(&served);
    let server = Server::start(move |request, _| truth.answer(request));
    let home = Home::new();
    let first = image(home.pull(&server.host()));
    // The store has the files of the layers, but not their blobs.
    assert_eq!(image(home.pull_as(&server.host(), Layers::Keep)), first);
    let blob = digest(&served.layers[1].blob).to_string().replace(':', "-");
    let names = std::fs::read_dir(home.path("store/blobs")).unwrap();
    let mut paths = names.map(|it| it.unwrap().path());
    let path = paths.find(|it| it.file_name().is_some_and(|it| *it == *blob)).unwrap();
    std::fs::remove_file(&path).unwrap();
    let before = server.lines().len();
    assert_eq!(image(home.pull_as(&server.host(), Layers::Keep)), first);
    let again = server.lines().split_off(before);
    assert!(again.contains(&format!("GET /v2/app/blobs/{}", digest(&served.layers[1].blob))));
    assert!(!again.contains(&format!("GET /v2/app/blobs/{}", digest(&served.layers[0].blob))));
    assert!(path.exists());
}
