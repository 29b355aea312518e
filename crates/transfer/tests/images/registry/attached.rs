//! Tests manifests with a subject, which either the registry or the client lists.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use quire_transfer::pull::Layers;

use super::*;
use crate::home::Home;
use testing::fake::{Reply, Request, Server, reply};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// Manifests by the path of their PUT request.
type Put = Arc<Mutex<BTreeMap<String, Vec<u8>>>>;

/// A registry that stores manifests, but does not support referrers.
fn keeps(put: &Put, request: &Request) -> Reply {
    let mut put = put.lock().unwrap();
    match request.method.as_str() {
        "PUT" => {
            put.insert(request.path.clone(), request.body.clone());
            reply(201)
        }
        _ if request.path.contains("/referrers/") => reply(404),
        _ => put.get(&request.path).map_or_else(|| reply(404), |bytes| reply(200).body(bytes)),
    }
}

fn referrer(subject: &Digest, note: &str) -> String {
    format!(
        r#"{{"schemaVersion":2,"mediaType":"{MANIFEST}","artifactType":"a/b","config":{{"mediaType":"application/vnd.oci.empty.v1+json","digest":"{}","size":2}},"layers":[],"subject":{{"mediaType":"{MANIFEST}","digest":"{subject}","size":2}},"annotations":{{"note":"{note}"}}}}"#,
        digest(b"{}")
    )
}

/// Returns the index at the tag of `subject`.
fn index(put: &Put, subject: &Digest) -> serde_json::Value {
    let path = format!("/v2/app/manifests/{}", subject.to_string().replace(':', "-"));
    serde_json::from_slice(&put.lock().unwrap()[&path]).unwrap()
}

fn put(server: &Server, manifest: &str) -> Digest {
    let name = digest(manifest.as_bytes()).to_string();
    registry(&server.host(), &settings())
        .put_manifest(&name, MANIFEST, manifest.as_bytes())
        .unwrap()
        .digest
}

#[test]
fn a_registry_without_the_list_gets_an_index() {
    let kept = Put::default();
    let of = Arc::clone(&kept);
    let server = Server::start(move |request, _| keeps(&of, request));
    let subject = digest(b"subject");
    let [one, two] = ["one", "two"].map(|note| referrer(&subject, note));
    put(&server, &one);
    put(&server, &two);
    // A third request changes nothing.
    put(&server, &one);
    let entry = |manifest: &str, note: &str| {
        serde_json::json!({
            "mediaType": MANIFEST, "digest": digest(manifest.as_bytes()).to_string(), "size": manifest.len(),
            "annotations": {"note": note}, "artifactType": "a/b",
        })
    };
    let expect = serde_json::json!({
        "schemaVersion": 2, "mediaType": INDEX, "manifests": [entry(&one, "one"), entry(&two, "two")],
    });
    assert_eq!(index(&kept, &subject), expect);
    let found = registry(&server.host(), &settings()).referrers(&subject, Some("a/b")).unwrap();
    assert_eq!(found.len(), 2);
    assert_eq!(found[1].descriptor.annotations["note"], "two");
}

#[test]
fn a_registry_with_the_list_gets_no_index() {
    let server = Server::start(|request, _| match request.method.as_str() {
        "PUT" => reply(201).header("oci-subject", "x"),
        _ => reply(500),
    });
    put(&server, &referrer(&digest(b"subject"), "one"));
    assert_eq!(server.seen().len(), 1);
    // A manifest without a subject is not listed.
    let server = Server::start(|_, _| reply(201));
    put(&server, "{}");
    assert_eq!(server.seen().len(), 1);
}

#[test]
fn what_another_writes_at_the_same_time_is_not_lost() {
    let kept = Put::default();
    let (of, subject) = (Arc::clone(&kept), digest(b"subject"));
    let tag = format!("/v2/app/manifests/{}", subject.to_string().replace(':', "-"));
    let theirs = format!(r#"{{"manifests":[{{"digest":"{}"}}]}}"#, digest(b"theirs"));
    let is_first = std::sync::atomic::AtomicBool::new(true);
    let server = Server::start(move |request, _| {
        let answer = keeps(&of, request);
        // After our request, another client writes an old version of the index.
        if request.method == "PUT"
            && request.path == tag
            && is_first.swap(false, std::sync::atomic::Ordering::Relaxed)
        {
            of.lock().unwrap().insert(tag.clone(), theirs.clone().into_bytes());
        }
        answer
    });
    let one = referrer(&subject, "one");
    put(&server, &one);
    let index = index(&kept, &subject);
    let digests: Vec<_> =
        index["manifests"].as_array().unwrap().iter().map(|it| it["digest"].clone()).collect();
    assert_eq!(digests, [digest(b"theirs").to_string(), digest(one.as_bytes()).to_string()]);
}

#[test]
fn an_index_that_is_none_is_not_overwritten() {
    for (body, expect) in [
        ("{\"layers\":[]}", "it is a manifest, but an index was expected"),
        ("[", "the index is malformed: invalid type: sequence, expected a map at line 1 column 0"),
    ] {
        let server = Server::start(move |request, _| match request.method.as_str() {
            "PUT" => reply(201),
            _ => reply(200).body(body),
        });
        let subject = digest(b"subject");
        let manifest = referrer(&subject, "one");
        let error = registry(&server.host(), &settings())
            .put_manifest("1", MANIFEST, manifest.as_bytes())
            .unwrap_err();
        let text = chain(&error);
        assert!(text.contains(&format!("to the referrers of {subject}")), "{text}");
        assert!(text.ends_with(expect), "{text}");
        assert_eq!(server.seen().iter().filter(|it| it.method == "PUT").count(), 1);
    }
    // Detects a registry that does not store the index.
    let server = Server::start(|request, _| match request.method.as_str() {
        "PUT" => reply(201),
        _ => reply(404),
    });
    let manifest = referrer(&digest(b"subject"), "one");
    let error = registry(&server.host(), &settings())
        .put_manifest("1", MANIFEST, manifest.as_bytes())
        .unwrap_err();
    assert!(
        chain(&error).contains("the registry does not keep the list of referrers"),
        "{error:?}"
    );
}

#[test]
fn the_list_comes_in_pages_and_may_be_filtered() {
    let subject = digest(b"{}");
    let entry = |name: &str, kind: &str| {
        format!(
            r#"{{"mediaType":"{MANIFEST}","digest":"{}","size":2,"artifactType":{kind},"annotations":null}}"#,
            digest(name.as_bytes())
        )
    };
    let page = |entries: &[String]| {
        format!(
            r#"{{"schemaVersion":2,"mediaType":"{INDEX}","manifests":[{}]}}"#,
            entries.join(",")
        )
    };
    // The second page is filtered, as its header says; the first page is not.
    let first = page(&[entry("1", "\"a\""), entry("2", "\"b\""), entry("3", "null")]);
    let second = page(&[entry("4", "\"a\"")]);
    let next = format!("/v2/app/referrers/{subject}?page=2");
    let link = format!("<{next}>; rel=\"next\"");
    let server = Server::start(move |request, _| match request.path == next {
        true => reply(200).header("oci-filters-applied", "artifactType").body(&second),
        false => reply(200).header("link", &link).body(&first),
    });
    let there = registry(&server.host(), &settings());
    let digests = |kind: Option<&str>| {
        let found = there.referrers(&subject, kind).unwrap();
        found.into_iter().map(|it| it.descriptor.digest).collect::<Vec<_>>()
    };
    let all = ["1", "2", "3", "4"].map(|name| digest(name.as_bytes()));
    assert_eq!(digests(None), all);
    assert_eq!(digests(Some("a")), [all[0], all[3]]);
    assert!(digests(Some("c")).is_empty());
}

#[test]
fn docker_registry_keeps_the_index() {
    let Some(daemon) = real::start("") else { return };
    let there = registry(&daemon.host, &settings());
    let empty = b"{}";
    there.upload_blob(&digest(empty), 2, &mut &empty[..]).unwrap();
    let subject = digest(b"not there yet, which does not matter");
    for note in ["one", "two"] {
        let manifest = referrer(&subject, note);
        let stored = there.put_manifest(note, MANIFEST, manifest.as_bytes()).unwrap();
        assert!(!stored.knows_subject);
    }
    let found = there.referrers(&subject, None).unwrap();
    let notes: Vec<_> = found.iter().map(|it| it.descriptor.annotations["note"].as_str()).collect();
    assert_eq!(notes, ["one", "two"]);
    // The manifest is not an image, and the error says so.
    let home = Home::new();
    let error = home.pull_tag(&daemon.host, "one", Layers::Forget).unwrap_err();
    assert_eq!(
        chain(&error),
        format!(
            "cannot use the manifest of {}/app:one: it is an artifact of type \"a/b\", not an image",
            daemon.host
        )
    );
}
