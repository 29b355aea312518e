//! `docs/format/object-store.md` describes the files on disk: files built by hand from its tables are read, and
//! written files are parsed by these tables.

use std::fs;
use std::path::Path;

use image::verity::{Algorithm, ObjectId, VerityDigest, digest};
use sha2::{Digest as _, Sha256};

use super::snapshots::container_snapshots;
use super::{fast_directory, import, name, open, sample};
use crate::{
    Chunk, ChunkKey, ContainerSnapshotRecord, Digest, ObjectPart, OpenOptions, Seconds, Store,
};

const DOCUMENT: &str = include_str!("../../../../docs/format/object-store.md");

/// Returns the rows of the table with this head, as cells.
fn table(head: &str) -> Vec<Vec<&'static str>> {
    let lines = DOCUMENT.lines().skip_while(|line| !line.starts_with(head));
    let rows = lines.skip(2).take_while(|line| line.starts_with('|'));
    let rows: Vec<Vec<_>> =
        rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect();
    assert!(!rows.is_empty(), "the document has no table {head}");
    rows
}

/// Returns offset from the end and size of the trailer's fields, in order.
fn trailer() -> Vec<(usize, usize)> {
    let rows = table("| offset | size | field |");
    let fields = rows.iter().filter_map(|row| {
        Some((row[0].strip_prefix("end - ")?.parse().unwrap(), row[1].parse().unwrap()))
    });
    fields.collect()
}

fn number(bytes: &[u8]) -> usize {
    usize::try_from(u64::from_le_bytes(bytes.try_into().unwrap())).unwrap()
}

#[test]
fn a_layer_as_the_document_has_it_is_read() {
    let directory = fast_directory();
    let store = open(directory.path());
    import(&store, "one", &sample("one", 2)).unwrap();
    let objects = [[0xab; 32], [0xcd; 32]];
    let diff_id = Digest::sha256(b"a tar");
    let blob = Digest::sha256(b"a blob");
    let recipe = b"QUIREREC and more".repeat(10);
    let json = format!(
        r#"{{"diff_id":"{diff_id}","size":5,"blobs":[{{"digest":"{blob}","size":6,"media_type":"x/y"}}],"recipe_size":{}}}"#,
        recipe.len()
    );
    // Built from the rows of the table, one by one.
    let mut file = b"quirelay".to_vec();
    file.extend(zstd::encode_all(&recipe[..], 19).unwrap());
    let lengths = [file.len(), objects.len(), json.len()];
    file.extend(objects.concat());
    file.extend(json.as_bytes());
    for length in lengths {
        file.extend((length as u64).to_le_bytes());
    }
    file.extend(b"layend\0\x01");
    let hash = Sha256::digest(&file);
    file.extend(hash);
    let path = format!("layers/{}", diff_id.to_string().replace(':', "-"));
    fs::write(directory.path().join(path), &file).unwrap();

    let layer = store.layers.open(&diff_id).unwrap().unwrap();
    let info = layer.info();
    assert_eq!((info.diff_id, info.size), (diff_id, 5));
    assert_eq!((info.blobs[0].digest, info.blobs[0].size), (blob, 6));
    assert_eq!(info.blobs[0].media_type, "x/y");
    assert!(!info.is_in(&blob), "whoever wrote it does not say that the blob was hashed");
    assert_eq!(info.objects, objects.map(|id| ObjectId::from_bytes(&id).unwrap()));
    let mut found = Vec::new();
    std::io::Read::read_to_end(&mut layer.recipe().unwrap(), &mut found).unwrap();
    assert!(found == recipe);
}

#[test]
fn a_layer_is_written_as_the_document_has_it() {
    let [(r, 8), (n, 8), (j, 8), (mark, 8), (hash, 32)] = trailer()[..] else {
        panic!("{:?}", trailer());
    };
    assert_eq!(hash, 32, "the last field ends the file");
    let directory = fast_directory();
    let files = sample("one", 2);
    import(&open(directory.path()), "one", &files).unwrap();
    let entry = fs::read_dir(directory.path().join("layers")).unwrap().next().unwrap().unwrap();
    let file = fs::read(entry.path()).unwrap();
    let field = |from_end: usize, size: usize| &file[file.len() - from_end..][..size];
    assert_eq!(field(mark, 8), b"layend\0\x01");
    assert_eq!(field(hash, 32), &*Sha256::digest(&file[..file.len() - hash]));
    let (r, n, j) = (number(field(r, 8)), number(field(n, 8)), number(field(j, 8)));
    assert_eq!(r + n * 32 + j + 64, file.len());
    assert_eq!(file[..8], *b"quirelay");
    let recipe = zstd::decode_all(&file[8..r]).unwrap();
    assert!(recipe.starts_with(b"QUIREREC\x01\x01"));
    let mut ids: Vec<_> = file[r..r + n * 32].chunks(32).collect();
    ids.sort_unstable();
    let large = files.values().filter(|it| it.len() > 64);
    let wanted: Vec<_> = large.map(|bytes| digest(Algorithm::Sha256, bytes)).collect();
    let mut wanted: Vec<_> = wanted.iter().map(VerityDigest::as_bytes).collect();
    wanted.sort_unstable();
    assert_eq!(ids, wanted);
    let json: serde_json::Value = serde_json::from_slice(&file[r + n * 32..][..j]).unwrap();
    assert_eq!(json["recipe_size"], recipe.len());
    let name = entry.file_name().into_string().unwrap();
    assert_eq!(json["diff_id"].as_str().unwrap(), name.replacen('-', ":", 1));
    let mut fields: Vec<_> = json.as_object().unwrap().keys().map(String::as_str).collect();
    fields.sort_unstable();
    assert_eq!(fields, ["blobs", "diff_id", "recipe_size", "size"]);
    let mut fields: Vec<_> = json["blobs"][0].as_object().unwrap().keys().collect();
    fields.sort_unstable();
    assert_eq!(fields, ["digest", "hashed", "media_type", "size"]);
    assert_eq!(json["blobs"][0]["hashed"], true);
}

/// The example in the document.
#[test]
fn chunks_as_the_document_has_them_are_read() {
    let directory = fast_directory();
    let store = open(directory.path());
    let layer = Digest::sha256(b"a layer");
    let path = directory.path().join("blobs").join(layer.file_name() + ".chunks");
    let example = include_bytes!("../../../../testdata/formats/chunks");
    fs::write(path, example).unwrap();
    let key: [u8; 32] = Sha256::digest(b"line 12").into();
    let mut found = Vec::new();
    let wanted = [ChunkKey([0x33; 32]), ChunkKey(key)];
    store.downloads.find_chunks(&wanted, &mut |at, chunk| found.push((at, chunk))).unwrap();
    let object = ObjectId::from_bytes(&example[0x28..0x48]).unwrap();
    let part = Chunk::Object(ObjectPart { object, offset: 88, length: 7 });
    assert_eq!(found, [(1, part), (0, Chunk::Bytes(b"a gap".to_vec()))]);
}

fn record(json: &str) -> String {
    let line = format!("{json}\n");
    format!("{line}{}\n", Digest::sha256(line.as_bytes()))
}

/// Returns the fields that the document lists for a record, in alphabetical order.
fn fields(of: &str) -> Vec<&'static str> {
    let rows = table("| record | fields |");
    let row = rows.iter().find(|row| row[0] == of).expect("the document has the record");
    // In the document, each field is a code span before a colon or a value. Values are also code spans, but follow
    // their field.
    let known = [
        "address",
        "algorithm",
        "anonymous",
        "below",
        "boot",
        "bridge",
        "bytes",
        "container",
        "created",
        "dns",
        "ends_with_container",
        "form",
        "format",
        "fresh",
        "gateway",
        "id",
        "image",
        "image_name",
        "inodes",
        "internal",
        "keep",
        "labels",
        "manifest",
        "map",
        "name",
        "needed_to_read",
        "needed_to_write",
        "prefix",
        "snapshot",
        "volumes",
    ];
    known.into_iter().filter(|field| row[1].contains(&format!("`{field}`"))).collect()
}

/// Returns the fields of a file that is a record, in alphabetical order.
fn written(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    let (json, _) = text.split_once('\n').unwrap();
    assert_eq!(text, record(json));
    let json: serde_json::Value = serde_json::from_str(json).unwrap();
    let mut fields: Vec<_> = json.as_object().unwrap().keys().cloned().collect();
    fields.sort_unstable();
    fields
}

#[test]
fn records_are_written_as_the_document_has_them() {
    let directory = fast_directory();
    let store = open(directory.path());
    let image = import(&store, "one", &sample("one", 1)).unwrap();
    let snapshot = ContainerSnapshotRecord {
        manifest: Some(image::digest::Digest::sha256(b"x")),
        image_name: Some("one".to_owned()),
        map: Some("0 1 1".to_owned()),
        boot: container_snapshots::this_boot(),
        ..container_snapshots::snapshot(&store, Some("s"), None)
    };
    let below = Some(container_snapshots::publish(&store, &snapshot).unwrap().id);
    let snapshot = ContainerSnapshotRecord { name: Some("t".to_owned()), below, ..snapshot };
    let snapshot = container_snapshots::publish(&store, &snapshot).unwrap().id;
    let container = crate::ContainerRecord {
        image,
        manifest: Some(image::digest::Digest::sha256(b"x")),
        name: None,
        created: Seconds(5),
        keep: false,
        shared: None,
        boot: Some("b".to_owned()),
        snapshot: Some(snapshot.clone()),
        volumes: vec!["v".to_owned()],
    };
    let lock = store.hold_volumes().unwrap();
    let labels = [("a".to_owned(), "b".to_owned())].into();
    let volume = crate::VolumeRecord { labels, ..crate::VolumeRecord::new(Seconds(5)) };
    let (draft, files) = (store.volumes.draft().unwrap(), crate::VolumeFiles::Synced);
    store.publish_volume(&lock, draft, "v", &volume, files).unwrap();
    drop(lock);
    let network = crate::NetworkRecord {
        id: "0a".repeat(32),
        created: Seconds(5),
        labels: [("a".to_owned(), "b".to_owned())].into(),
        bridge: "quire-0123abcd".to_owned(),
        address: "10.90.0.0".parse().unwrap(),
        prefix: 24,
        gateway: "10.90.0.1".parse().unwrap(),
        internal: true,
        dns: true,
    };
    let lock = store.lock_networks().unwrap();
    store.networks.publish(&lock, "n", &network).unwrap();
    assert_eq!(store.networks.get("n").unwrap(), network);
    drop(lock);
    let _container = store.create_container("c", &container).unwrap();
    let path = |name: &str| directory.path().join(name);
    assert_eq!(written(&path("meta")), fields("`meta`"));
    assert_eq!(written(&path("refs/one:latest")), fields("ref"));
    assert_eq!(written(&path("containers/c/container.json")), fields("container"));
    let file = path(&format!("container-snapshots/{snapshot}/snapshot.json"));
    assert_eq!(written(&file), fields("container snapshot"));
    assert_eq!(written(&path("volumes/v/volume.json")), fields("volume"));
    assert_eq!(written(&path("networks/n")), fields("network"));
}

#[test]
fn records_as_the_document_has_them_are_read() {
    let directory = fast_directory();
    drop(open(directory.path()));
    let path = |name: &str| directory.path().join(name);
    let write = |name: &str, json: &str| {
        drop(fs::remove_file(path(name)));
        fs::write(path(name), record(json)).unwrap();
    };
    write("meta", r#"{"format":2,"algorithm":"sha512","needed_to_read":[],"needed_to_write":[]}"#);
    let store =
        Store::open(directory.path(), crate::Who::this_process(), OpenOptions::read()).unwrap();
    assert_eq!(store.algorithm(), Algorithm::Sha512);
    write("meta", r#"{"format":2,"algorithm":"sha256","needed_to_read":[],"needed_to_write":[]}"#);
    let store =
        Store::open(directory.path(), crate::Who::this_process(), OpenOptions::read()).unwrap();
    let image = "ab".repeat(32);
    let json = format!(
        r#"{{"name":"a/b:c","image":"{image}","manifest":null,"form":"objects","created":7}}"#
    );
    write("refs/a%2Fb:c", &json);
    let reference = store.refs.get(&name("a/b:c")).unwrap().unwrap();
    assert_eq!(reference.image.to_string(), image);
    assert_eq!((reference.manifest, reference.created), (None, Seconds(7)));
}

/// A new store has exactly the entries that the document lists.
#[test]
fn a_store_has_the_places_that_the_document_lists() {
    let directory = fast_directory();
    drop(open(directory.path()));
    let mut found: Vec<_> = fs::read_dir(directory.path())
        .unwrap()
        .map(|it| it.unwrap().file_name().into_string().unwrap())
        .collect();
    found.sort_unstable();
    let rows = table("| path | content |");
    let mut wanted: Vec<_> = rows
        .iter()
        .map(|row| row[0].trim_matches('`').split('/').next().unwrap().to_owned())
        .collect();
    // These entries are created with the first device, the first lazy device, the first snapshot of a container, the
    // first volume, the first network and the first engine, when the store is shared, and when files are not synced.
    let late = ["data", "lazy", "container-snapshots", "snapshots", "volumes", "networks"];
    found.extend(late.map(str::to_owned));
    found.extend(["shared", "unsynced"].map(str::to_owned));
    found.sort_unstable();
    wanted.sort_unstable();
    wanted.dedup();
    assert_eq!(found, wanted);
}
