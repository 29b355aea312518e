//! Tests which bytes an export uses for each layer of a manifest.

use std::fs;
use std::io::Read as _;

use serde_json::{Value, json};
use store::Digest;

use super::{Home, all, chain, damage};
use crate::build::{Layout, Pack, Tar, pack};
use quire_transfer::export::{Compression, ExportPlan, How, plan};

const OCI: &str = "application/vnd.oci.image.layer.v1.tar";

/// Imports an image of these layers, whose manifest has additional fields. Returns the digest of the manifest, its
/// bytes, and the blobs.
fn image(home: &Home, tars: &[(Vec<u8>, Pack)]) -> (Digest, Vec<u8>, Vec<Vec<u8>>) {
    let path = home.path("layout");
    let mut layout = Layout::new(&path);
    let (plain, _) = layout.image(tars);
    let digest: Digest = plain["digest"].as_str().unwrap().parse().unwrap();
    let mut manifest: Value =
        serde_json::from_slice(&fs::read(layout.blob_path(&digest)).unwrap()).unwrap();
    manifest["annotations"] = json!({ "z": "1", "a": "2" });
    manifest["odd"] = json!([1, { "b": null }]);
    for ((_, how), layer) in tars.iter().zip(manifest["layers"].as_array_mut().unwrap()) {
        layer["annotations"] = json!({ "of": "the layer" });
        layer["mediaType"] = json!(match how {
            Pack::Plain => OCI.to_owned(),
            Pack::Gzip | Pack::Gzips => format!("{OCI}+gzip"),
            Pack::Zstd => format!("{OCI}+zstd"),
        });
    }
    let bytes = serde_json::to_vec_pretty(&manifest).unwrap();
    let descriptor = layout.descriptor("application/vnd.oci.image.manifest.v1+json", &bytes);
    layout.add(descriptor, None, None);
    let report = home.import_path("oci", &path);
    assert_eq!(report.manifest, Some(Digest::sha256(&bytes)));
    let blobs = tars.iter().map(|(tar, how)| pack(tar, *how)).collect();
    (Digest::sha256(&bytes), bytes, blobs)
}

fn tars() -> [Vec<u8>; 3] {
    let content: Vec<u8> = (0..200_000_u32).flat_map(|at| (at / 7).to_le_bytes()).collect();
    [
        Tar::from_text("d a,f a/b short").file("a/c", &content).bytes(),
        Tar::default().file("d", &content[..5000]).bytes(),
        Tar::from_text("w a/.wh.b").bytes(),
    ]
}

fn unpacked(bytes: &[u8]) -> Vec<u8> {
    match bytes {
        [0x1f, 0x8b, ..] => all(flate2::bufread::MultiGzDecoder::new(bytes)),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => zstd::decode_all(bytes).unwrap(),
        _ => bytes.to_vec(),
    }
}

/// Checks that each layer's bytes match its descriptor and decompress to its tar, that the config is unchanged, and
/// that the manifest differs from the original only in three fields of some layers.
#[track_caller]
fn check(home: &Home, plan: &ExportPlan, original: &[u8], tars: &[(Vec<u8>, Pack)]) {
    assert_eq!(Digest::sha256(&plan.manifest), plan.digest);
    assert!(plan.config.digest.matches(&plan.config_bytes));
    let mut expected: Value = serde_json::from_slice(original).unwrap();
    for (at, (layer, (tar, _))) in plan.layers.iter().zip(tars).enumerate() {
        let bytes = all(layer.open(&home.store).unwrap());
        assert_eq!(bytes.len() as u64, layer.descriptor.size);
        assert_eq!(Digest::sha256(&bytes), layer.descriptor.digest);
        assert!(unpacked(&bytes) == *tar, "layer {at} unpacks to something else");
        assert_eq!(all(layer.open(&home.store).unwrap()), bytes, "it cannot be read again");
        let entry = &mut expected["layers"][at];
        entry["mediaType"] = json!(layer.descriptor.media_type);
        entry["digest"] = json!(layer.descriptor.digest.to_string());
        entry["size"] = json!(layer.descriptor.size);
    }
    let given: Value = serde_json::from_slice(&plan.manifest).unwrap();
    // The documents are compared as texts, because the order of fields matters.
    assert_eq!(given.to_string(), expected.to_string());
    assert_eq!(plan.is_unchanged, plan.manifest == original);
}

fn hows(plan: &ExportPlan) -> Vec<How> {
    plan.layers.iter().map(|layer| layer.how).collect()
}

#[test]
fn an_image_whose_blobs_were_kept_is_given_as_it_was() {
    let home = Home::new();
    let [a, b, c] = tars();
    let packed = [(a, Pack::Gzips), (b, Pack::Plain), (c, Pack::Zstd)];
    let (digest, bytes, blobs) = image(&home, &packed);
    let planned = plan(&home.store, &digest, Compression::AsItWas, &home.options()).unwrap();
    assert_eq!(hows(&planned), [How::Compressed, How::Plain, How::Compressed]);
    assert!(!planned.is_unchanged);
    check(&home, &planned, &bytes, &packed);
    let types: Vec<_> = planned.layers.iter().map(|it| &*it.descriptor.media_type).collect();
    assert_eq!(types, [&*format!("{OCI}+gzip"), OCI, &*format!("{OCI}+zstd")]);

    home.keep(&blobs[0]);
    home.keep(&blobs[2]);
    let planned = plan(&home.store, &digest, Compression::AsItWas, &home.options()).unwrap();
    assert_eq!(hows(&planned), [How::Kept, How::Plain, How::Kept]);
    assert!(planned.is_unchanged);
    assert_eq!((planned.digest, &planned.manifest), (digest, &bytes));
    check(&home, &planned, &bytes, &packed);
    for (layer, blob) in planned.layers.iter().zip(&blobs) {
        assert_eq!(all(layer.open(&home.store).unwrap()), *blob);
    }
}

#[test]
fn layers_are_packed_as_asked_for() {
    let home = Home::new();
    let [a, b, c] = tars();
    let packed = [(a.clone(), Pack::Gzip), (b, Pack::Plain), (c, Pack::Zstd), (a, Pack::Gzip)];
    let (digest, bytes, blobs) = image(&home, &packed);
    for kept in [false, true] {
        if kept {
            for blob in &blobs {
                home.keep(blob);
            }
        }
        for (compression, suffix) in
            [(Compression::Gzip, "+gzip"), (Compression::Zstd, "+zstd"), (Compression::None, "")]
        {
            let planned = plan(&home.store, &digest, compression, &home.options()).unwrap();
            check(&home, &planned, &bytes, &packed);
            for layer in &planned.layers {
                assert_eq!(layer.descriptor.media_type, format!("{OCI}{suffix}"));
            }
            assert_eq!(planned.layers[0].descriptor, planned.layers[3].descriptor);
            let again = plan(&home.store, &digest, compression, &home.options()).unwrap();
            assert_eq!(again.digest, planned.digest, "{compression:?} is not deterministic");
            let is = |how| planned.layers.iter().filter(|it| it.how == how).count();
            let expected = match (kept, compression) {
                (false, Compression::None) => (0, 4),
                (true, Compression::None) => (1, 3),
                (true, Compression::Gzip) => (2, 0),
                (true, Compression::Zstd) => (1, 0),
                _ => (0, 0),
            };
            assert_eq!((is(How::Kept), is(How::Plain)), expected, "{kept} {compression:?}");
        }
    }
}

#[test]
fn a_damaged_blob_is_an_error() {
    let home = Home::new();
    let packed = [(tars()[0].clone(), Pack::Gzip)];
    let (digest, _, blobs) = image(&home, &packed);
    let kept = home.keep(&blobs[0]).to_string().replace(':', "-");
    damage(&home.path("store/blobs").join(kept));
    let planned = plan(&home.store, &digest, Compression::AsItWas, &home.options()).unwrap();
    let mut reader = planned.layers[0].open(&home.store).unwrap();
    let error = reader.read_to_end(&mut Vec::new()).unwrap_err();
    assert!(chain(&error).contains("the bytes have the digest"), "{}", chain(&error));
    // Another compression does not need the damaged blob.
    let planned = plan(&home.store, &digest, Compression::Zstd, &home.options()).unwrap();
    check(&home, &planned, &fs::read(manifest_path(&home, &digest)).unwrap(), &packed);
}

fn manifest_path(home: &Home, digest: &Digest) -> std::path::PathBuf {
    home.path("store/manifests").join(digest.to_string().replace(':', "-"))
}

#[test]
fn what_is_missing_is_named() {
    let home = Home::new();
    let (digest, _, _) = image(&home, &[(tars()[0].clone(), Pack::Gzip)]);
    let failed =
        |compression| chain(&plan(&home.store, &digest, compression, &home.options()).unwrap_err());
    for object in home.objects() {
        fs::remove_file(object).unwrap();
    }
    assert!(failed(Compression::Gzip).contains("not in the store"));
    let layer = fs::read_dir(home.path("store/layers")).unwrap().next().unwrap().unwrap();
    fs::remove_file(layer.path()).unwrap();
    assert!(failed(Compression::None).contains("the store has no layer sha256:"));
    fs::remove_file(manifest_path(&home, &digest)).unwrap();
    assert_eq!(failed(Compression::AsItWas), format!("the store has no manifest {digest}"));
}
