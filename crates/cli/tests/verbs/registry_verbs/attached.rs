//! Artifacts that are attached to images in a registry, and references that are not images.

use oci::Digest;
use oci::reference::Reference;
use oci::registry::{Registry, Settings};
use serde_json::{Value, json};

use crate::registry_verbs::registries::{place, start};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const EMPTY: &str = "application/vnd.oci.empty.v1+json";

#[test]
fn what_is_attached_is_shown() {
    let place = place(1);
    let Some(daemon) = start(&place) else { return };
    let target = format!("{}/team/app:1", daemon.host);
    place.out(&format!("push a:1 {target}"));
    let reference: Reference = target.parse().unwrap();
    let there = Registry::new(&reference, &Settings::default()).unwrap();
    let subject = there.manifest("1").unwrap();
    let heading = "DIGEST  TYPE  SIZE  ANNOTATIONS\n";
    assert_eq!(place.out(&format!("referrers {target}")), heading);

    let empty = Digest::sha256(b"{}");
    there.upload_blob(&empty, 2, &mut &b"{}"[..]).unwrap();
    let attach = |kind: &str, note: &str| {
        let descriptor = json!({"mediaType": EMPTY, "digest": empty.to_string(), "size": 2});
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST, "artifactType": kind, "config": descriptor,
            "layers": [descriptor], "annotations": {"note": note},
            "subject": {"mediaType": MANIFEST, "digest": subject.digest.to_string(), "size": subject.bytes.len()},
        });
        let bytes = manifest.to_string().into_bytes();
        (there.put_manifest(note, MANIFEST, &bytes).unwrap().digest, bytes.len())
    };
    let (one, size) = attach("application/spdx+json", "one");
    let (two, _) = attach("a/\u{1b}[31mb", "two");
    let text = place.out(&format!("referrers {target}"));
    let lines: Vec<_> = text.lines().collect();
    let expect = format!("{one}  application/spdx+json  {size} B  note=one");
    assert_eq!(
        lines[1].split_whitespace().collect::<Vec<_>>(),
        expect.split_whitespace().collect::<Vec<_>>()
    );
    assert!(lines[2].contains("a/\\u{1b}[31mb"), "{text}");
    let by_digest = format!("{}/team/app@{}", daemon.host, subject.digest);
    let text = place.out(&format!("referrers --json --type application/spdx+json {by_digest}"));
    let expect = json!({"subject": subject.digest.to_string(), "referrers": [{
        "digest": one.to_string(), "mediaType": MANIFEST, "artifactType": "application/spdx+json",
        "size": size, "annotations": {"note": "one"},
    }]});
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), expect);

    // Neither digest is an image.
    for digest in [one, two] {
        let ran = place.run(&format!("pull {}/team/app@{digest}", daemon.host));
        assert_eq!(ran.code, Some(2));
        assert!(
            ran.err.contains("it is an artifact of type") && ran.err.contains("oras"),
            "{}",
            ran.err
        );
        assert!(!ran.err.contains('\u{1b}'), "{}", ran.err);
    }
    let ran = place.run(&format!("referrers --platform linux/amd64 {target}"));
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("is not an index"), "{}", ran.err);
    let ran = place.run(&format!("referrers {}/team/none:1", daemon.host));
    assert_eq!(ran.code, Some(3));
}
