//! Tests policies and signatures, from the registry to the decision at use.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod keys;
mod registry;

use std::path::Path;

use image::dump::Strictness;
use image::erofs::{Profile, Versions, write};
use oci::Digest;
use oci::policy::{Evidence, ImageOrigin, Policies, Repository, Subject, admit};
use quire_transfer::evidence::{self, check_use, check_use_by_engine};
use store::{Form, OpenOptions, Origin, RefName, Reference, Resolved, Seconds, Store};

use keys::{KINDS, Key, Kind};
use registry::{Registry, payload};

const NAME: &str = "registry.example/team/app";

fn policies(folder: &Path, text: &str) -> Policies {
    let file = folder.join("policy.toml");
    std::fs::write(&file, text).unwrap();
    Policies::load(&[file]).unwrap()
}

/// Makes a policy that accepts only images signed by these keys.
fn signed_by(folder: &Path, keys: &[&Key], more: &str) -> Policies {
    let keys: Vec<_> = keys.iter().map(|it| it.public.to_str().unwrap()).collect();
    let rule =
        "default = \"none\"\n[[rule]]\nmatch = \"registry.example/**\"\naccept = \"signed\"\n";
    policies(folder, &format!("{rule}keys = {keys:?}\n{more}"))
}

fn name(text: &str) -> Repository {
    Repository::from_name(text).unwrap()
}

fn ask(policies: &Policies, registry: &Registry, manifest: &Digest) -> Result<Evidence, String> {
    let answer = admit(policies, registry, &name(NAME), manifest, Vec::new());
    answer.map(|it| it.1).map_err(|it| it.to_string())
}

fn check_refused(result: Result<Evidence, String>, expect: &str) {
    let refusal = result.unwrap_err();
    assert!(refusal.contains(expect), "{refusal}");
    assert!(refusal.contains("rule 1 of ") && refusal.contains("line 2"), "{refusal}");
}

#[test]
fn signatures_of_every_kind_of_key() {
    if testing::program("openssl").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let manifest = Digest::sha256(b"manifest");
    let stranger = Key::make(folder.path(), "stranger", Kind::P256);
    let payload = payload(NAME, &manifest);
    for kind in KINDS {
        let key = Key::make(folder.path(), &format!("{kind:?}"), kind);
        let signature = key.sign(&payload);
        let policies = signed_by(folder.path(), &[&stranger, &key], "");
        let mut tagged = Registry::default();
        tagged.tag_signature(&manifest, &payload, &signature);
        assert_eq!(ask(&policies, &tagged, &manifest).unwrap().signatures.len(), 1, "{kind:?}");
        let mut referring = Registry::default();
        referring.refer_signature(&manifest, &payload, &signature);
        assert_eq!(ask(&policies, &referring, &manifest).unwrap().signatures.len(), 1, "{kind:?}");

        for flipped in [0, signature.len() / 2, signature.len() - 1] {
            let mut signature = signature.clone();
            signature[flipped] ^= 1;
            tagged.tag_signature(&manifest, &payload, &signature);
            check_refused(ask(&policies, &tagged, &manifest), "1 signature(s), but none by");
        }
        let only_stranger = signed_by(folder.path(), &[&stranger], "");
        check_refused(ask(&only_stranger, &referring, &manifest), "stranger.pub");
    }
}

#[test]
fn signatures_that_do_not_count() {
    if testing::program("openssl").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let key = Key::make(folder.path(), "key", Kind::P256);
    let policies = signed_by(folder.path(), &[&key], "");
    let (manifest, other) = (Digest::sha256(b"manifest"), Digest::sha256(b"other"));
    check_refused(
        ask(&policies, &Registry::default(), &manifest),
        "the store has no signature of the image",
    );

    // A signature of another image, copied to the place of this one's.
    let theirs = payload(NAME, &other);
    let mut registry = Registry::default();
    registry.tag_signature(&manifest, &theirs, &key.sign(&theirs));
    check_refused(ask(&policies, &registry, &manifest), "but for other images");
    // A payload that was changed to fit.
    let ours = payload(NAME, &manifest);
    registry.tag_signature(&manifest, &ours, &key.sign(&theirs));
    check_refused(ask(&policies, &registry, &manifest), "none by");
    // A payload whose blob does not match its digest.
    registry.tag_signature(&manifest, &ours, &key.sign(&ours));
    assert!(ask(&policies, &registry, &manifest).is_ok());
    registry.contents.insert(Digest::sha256(&ours), [&ours[..], b" "].concat());
    check_refused(ask(&policies, &registry, &manifest), "the store has no signature of the image");
    // Other payloads that the same key signed, including garbage.
    for payload in [
        String::from_utf8(ours.clone()).unwrap().replace("cosign container", "atomic container"),
        "{".into(),
    ] {
        let mut registry = Registry::default();
        registry.tag_signature(&manifest, payload.as_bytes(), &key.sign(payload.as_bytes()));
        check_refused(
            ask(&policies, &registry, &manifest),
            "the store has no signature of the image",
        );
    }
    let mut registry = Registry::default();
    registry.tags.insert(format!("{}.sig", manifest.to_string().replace(':', "-")), b"[]".to_vec());
    check_refused(ask(&policies, &registry, &manifest), "the store has no signature of the image");
    // A referrer that does not match its digest.
    let mut registry = Registry::default();
    registry.refer_signature(&manifest, &ours, &key.sign(&ours));
    let announced = registry.referrers[0].2;
    registry.contents.insert(announced, b"{}".to_vec());
    check_refused(ask(&policies, &registry, &manifest), "the store has no signature of the image");
}

#[test]
fn a_signature_is_for_a_repository() {
    if testing::program("openssl").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let key = Key::make(folder.path(), "key", Kind::Ed25519);
    let manifest = Digest::sha256(b"manifest");
    let strict = signed_by(folder.path(), &[&key], "");
    let free = signed_by(folder.path(), &[&key], "identity = \"any\"");
    let named = signed_by(folder.path(), &[&key], "identity = \"docker.io/library/alpine\"");
    let cases = [
        (NAME, true, false),
        ("Registry.example:443/team/app", true, false),
        (&format!("{NAME}:1.2@{manifest}"), true, false),
        ("registry.example/team/other", false, false),
        ("alpine", false, true),
        ("index.docker.io/library/alpine:3", false, true),
        ("", false, false),
    ];
    for (reference, is_ours, is_alpine) in cases {
        let payload = payload(reference, &manifest);
        let mut registry = Registry::default();
        registry.tag_signature(&manifest, &payload, &key.sign(&payload));
        assert_eq!(ask(&strict, &registry, &manifest).is_ok(), is_ours, "{reference}");
        assert_eq!(ask(&named, &registry, &manifest).is_ok(), is_alpine, "{reference}");
        assert!(ask(&free, &registry, &manifest).is_ok(), "{reference}");
    }
    let theirs = payload("registry.example/team/other", &manifest);
    let mut registry = Registry::default();
    registry.tag_signature(&manifest, &theirs, &key.sign(&theirs));
    check_refused(
        ask(&strict, &registry, &manifest),
        "signed it as registry.example/team/other, not as registry.example/team/app; identity = \
         \"registry.example/team/other\" would accept that",
    );
}

#[test]
fn bundles_of_cosign_3() {
    if testing::program("openssl").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let key = Key::make(folder.path(), "key", Kind::P256);
    let manifest = Digest::sha256(b"manifest");
    let hex = manifest.to_string().replace("sha256:", "");
    let statement = format!(
        "{{\"_type\":\"https://in-toto.io/Statement/v1\",\"subject\":[{{\"digest\":{{\"sha256\":\"{hex}\"}}}}],\
         \"predicateType\":\"https://sigstore.dev/cosign/sign/v1\",\"predicate\":{{}}}}"
    );
    let free = signed_by(folder.path(), &[&key], "identity = \"any\"");
    let strict = signed_by(folder.path(), &[&key], "");
    let mut registry = Registry::default();
    registry.refer_bundle(&manifest, &key, statement.as_bytes());
    assert!(ask(&free, &registry, &manifest).is_ok());
    check_refused(ask(&strict, &registry, &manifest), "identity = \"any\" would accept it");
    // An attestation by the same key is not a signature of the image.
    let attestation = statement.replace("sigstore.dev/cosign/sign/v1", "slsa.dev/provenance/v1");
    let mut registry = Registry::default();
    registry.refer_bundle(&manifest, &key, attestation.as_bytes());
    check_refused(ask(&free, &registry, &manifest), "the store has no signature of the image");
    let mut registry = Registry::default();
    registry.refer_bundle(&manifest, &key, statement.replace(&hex, &"0".repeat(64)).as_bytes());
    check_refused(ask(&free, &registry, &manifest), "for other images");
}

fn index(manifest: &Digest) -> Vec<u8> {
    let it = format!("{{\"mediaType\":\"\",\"size\":1,\"digest\":\"{manifest}\"}}");
    format!("{{\"schemaVersion\":2,\"manifests\":[{it}]}}").into_bytes()
}

#[test]
fn who_signs_an_index_signs_what_it_lists() {
    if testing::program("openssl").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let key = Key::make(folder.path(), "key", Kind::P256);
    let policies = signed_by(folder.path(), &[&key], "");
    let manifest = Digest::sha256(b"manifest");
    let inner = index(&manifest);
    let outer = index(&Digest::sha256(&inner));
    let payload = payload(NAME, &Digest::sha256(&outer));
    let mut registry = Registry::default();
    registry.tag_signature(&Digest::sha256(&outer), &payload, &key.sign(&payload));
    let ask = |manifest: &Digest, indexes: &[&Vec<u8>]| {
        let indexes = indexes.iter().map(|it| (*it).clone()).collect();
        admit(&policies, &registry, &name(NAME), manifest, indexes)
    };
    assert!(ask(&manifest, &[&inner, &outer]).is_ok());
    assert!(ask(&manifest, &[&outer, &inner]).is_ok());
    assert!(ask(&manifest, &[&outer]).is_err(), "the chain is broken");
    assert!(ask(&Digest::sha256(b"other"), &[&inner, &outer]).is_err(), "not listed");
}

/// Adds an image with this manifest and name to a store.
fn image(store: &Store, manifest: Option<&[u8]>, name: &str) {
    let import = store.begin().unwrap();
    let tree =
        image::dump::parse(&b"/ 0 40755 2 0 0 0 0.0 - - -\n"[..], Strictness::Strict).unwrap();
    let mut draft = import.image().unwrap();
    write(&tree, &Profile::Composefs(Versions::default()), &mut draft).unwrap();
    let image = draft.finish().unwrap();
    let manifest = manifest.map(|bytes| {
        import.manifest(&Digest::sha256(bytes), bytes).unwrap();
        Digest::sha256(bytes)
    });
    let reference = Reference { image, manifest, form: Form::Objects, created: Seconds(1) };
    if manifest.is_none() {
        import.add_origin(image, Origin { manifest, repository: None });
    }
    import.set_ref(name.parse::<RefName>().unwrap(), reference);
    import.commit().unwrap();
}

#[test]
fn the_policy_of_the_moment_decides_at_use() {
    if testing::program("openssl").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = ["old", "new"].map(|it| Key::make(folder.path(), it, Kind::P256));
    let bytes = b"{\"schemaVersion\":2}";
    let manifest = Digest::sha256(bytes);
    let mut registry = Registry::default();
    let payload = payload(NAME, &manifest);
    registry.tag_signature(&manifest, &payload, &old.sign(&payload));
    let store = Store::open(
        &folder.path().join("store"),
        store::Who::this_process(),
        OpenOptions::create(),
    )
    .unwrap();
    image(&store, Some(bytes), "docker.io/library/renamed");
    let check = |policies: &Policies| {
        let found = store.resolve("docker.io/library/renamed").unwrap();
        check_use(policies, &store, &found).map(|it| it.signed_by).map_err(|it| it.to_string())
    };
    let by_old = signed_by(folder.path(), &[&old], "");
    assert!(check(&by_old).unwrap_err().contains("does not have the origin"));
    let found = ask(&by_old, &registry, &manifest).unwrap();
    evidence::keep(&found, &store, &manifest).unwrap();
    assert_eq!(check(&by_old).unwrap(), std::slice::from_ref(&old.public));
    // The key is withdrawn. Then the image is signed again, and the old signature is kept.
    let by_new = signed_by(folder.path(), &[&new], "");
    assert!(check(&by_new).unwrap_err().contains("none by"));
    registry.tag_signature(&manifest, &payload, &new.sign(&payload));
    let found = ask(&by_new, &registry, &manifest).unwrap();
    evidence::keep(&found, &store, &manifest).unwrap();
    assert!(check(&by_new).is_ok());
    assert!(check(&by_old).is_ok());
    // The origin of the image counts, not its name.
    let rule =
        |it: &str| format!("default = \"any\"\n[[rule]]\nmatch = \"{it}\"\naccept = \"none\"\n");
    assert!(check(&policies(folder.path(), &rule("docker.io/**"))).is_ok());
    assert!(check(&policies(folder.path(), &rule("local"))).is_ok());
    assert!(check(&policies(folder.path(), &rule("registry.example/**"))).is_err());
    assert!(check(&Policies::load(&[]).unwrap()).is_ok());

    store.gc(Seconds(2)).unwrap();
    assert!(check(&by_new).is_ok());
    store.downloads.set_signatures(&manifest, b"{\"origins\":[").unwrap();
    assert!(check(&by_new).unwrap_err().contains("damaged"));
    let found = ask(&by_new, &registry, &manifest).unwrap();
    evidence::keep(&found, &store, &manifest).unwrap();
    assert!(check(&by_new).is_ok());
}

#[test]
fn images_that_no_pull_brought_are_local() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(
        &folder.path().join("store"),
        store::Who::this_process(),
        OpenOptions::create(),
    )
    .unwrap();
    image(&store, None, "docker.io/library/a");
    let check = |text: &str| {
        let found = store.resolve("docker.io/library/a").unwrap();
        let answer = check_use(&policies(folder.path(), text), &store, &found);
        answer.map(|it| it.signed_by.len()).map_err(|it| it.to_string())
    };
    assert!(check("default = \"any\"").is_ok());
    let none = check("default = \"none\"").unwrap_err();
    let file = folder.path().join("policy.toml");
    let expect = format!(
        "the default of {} refuses docker.io/library/a:latest: no rule matches local; add a [[rule]] with \
         match = \"local\"",
        file.display()
    );
    assert_eq!(none, expect);
    let docker = "[[rule]]\nmatch = \"docker.io/**\"\naccept = \"any\"\n";
    assert!(check(&format!("default = \"none\"\n{docker}")).is_err(), "a name is no origin");
    let local = "[[rule]]\nmatch = \"local\"\naccept = \"any\"\n";
    assert!(check(&format!("default = \"none\"\n{local}")).is_ok());
    // Engines use the files with settings that the store does not know.
    let by_engine = |text: &str| {
        let found = store.resolve("docker.io/library/a").unwrap();
        let answer = check_use_by_engine(&policies(folder.path(), text), &found);
        answer.map(drop).map_err(|it| it.to_string())
    };
    assert!(by_engine("default = \"any\"").is_ok());
    let refused = by_engine(&format!("default = \"none\"\n{local}")).unwrap_err();
    assert!(refused.contains("does not have the origin"), "{refused}");
    let digests = format!("{local}digests = [\"{}\"]", Digest::sha256(b"x"));
    let error = check(&format!("default = \"any\"\n{digests}")).unwrap_err();
    assert!(error.ends_with("it accepts 1 digests, but this image has no manifest"), "{error}");
}

/// Looks up images by a name, by the id only, and by another name that the id was given.
#[test]
fn an_image_is_from_where_it_came_from_whatever_it_is_called() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(
        &folder.path().join("store"),
        store::Who::this_process(),
        OpenOptions::create(),
    )
    .unwrap();
    let [ours, theirs] = [&b"{\"schemaVersion\":2}"[..], b"{\"schemaVersion\":2,\"a\":1}"];
    image(&store, Some(ours), "name");
    let image_id = store.resolve("name").unwrap().image;
    let [ours, theirs] = [ours, theirs].map(Digest::sha256);
    let rule = |it: &str| format!("[[rule]]\nmatch = \"{it}\"\naccept = \"any\"\n");
    let only = |it: &str| policies(folder.path(), &format!("default = \"none\"\n{}", rule(it)));
    let add = |manifest: Option<Digest>, repository: Option<&str>| {
        let import = store.begin().unwrap();
        let repository = repository.map(str::to_owned);
        import.add_origin(image_id, Origin { manifest, repository });
        import.commit().unwrap();
    };
    let accepted = |manifest: Option<Digest>| {
        let found = Resolved { image: image_id, name: None, manifest };
        let is = |it: &str| check_use(&only(it), &store, &found).is_ok();
        ["local", "evil.example/**", "**"].map(is)
    };
    // There is no record of an origin.
    assert_eq!([accepted(None), accepted(Some(ours))], [[false; 3]; 2]);
    let any = policies(folder.path(), "default = \"any\"");
    assert!(check_use(&any, &store, &store.resolve("name").unwrap()).is_ok());
    add(Some(ours), Some("evil.example/app"));
    let from_evil = [false, true, true];
    assert_eq!([accepted(None), accepted(Some(ours))], [from_evil; 2]);
    // Another manifest may run another program.
    assert_eq!(accepted(Some(theirs)), [false; 3]);
    // The name is removed, so the image is found by its id, and has another name.
    store.remove_ref(&"name".parse().unwrap()).unwrap();
    assert_eq!(accepted(store.resolve(&image_id.to_string()).unwrap().manifest), from_evil);
    // The same files are imported from a local directory, so they may be used without the settings in the manifest.
    add(None, None);
    assert_eq!(accepted(None), [true; 3]);
    assert_eq!(accepted(Some(ours)), from_evil);
    add(Some(ours), None);
    assert_eq!(accepted(Some(ours)), [true; 3]);
    let path = folder.path().join(format!("store/blobs/{image_id}.origins"));
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[5] ^= 1;
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, bytes).unwrap();
    let found = Resolved { image: image_id, name: None, manifest: None };
    let error = check_use(&only("local"), &store, &found).unwrap_err().to_string();
    assert!(error.contains("is damaged: import or pull it again"), "{error}");
    // The record is removed with its image.
    store.gc(Seconds(2)).unwrap();
    assert!(!path.exists());
}

fn decide(policies: &Policies, from: &str, evidence: &Evidence) -> Result<(), String> {
    let manifest = Some(Digest::sha256(b"manifest"));
    let source = ImageOrigin::Repository(name(from));
    let subject = Subject { name: from.to_owned(), source, manifest, local: None };
    policies.decide(&subject, evidence).map(drop).map_err(|it| it.to_string())
}

#[test]
fn the_first_rule_decides() {
    let folder = tempfile::tempdir().unwrap();
    let digest = Digest::sha256(b"manifest");
    let policies = policies(
        folder.path(),
        &format!(
            "default = \"none\"\n\
             [[rule]]\nmatch = \"ghcr.io/bad/**\"\naccept = \"none\"\n\
             [[rule]]\nmatch = \"ghcr.io/**\"\naccept = \"any\"\n\
             [[rule]]\nmatch = \"ghcr.io/**\"\naccept = \"none\"\n\
             [[rule]]\nmatch = \"docker.io/library/a\"\naccept = \"any\"\ndigests = [\"{digest}\"]\n\
             [[rule]]\nmatch = \"docker.io/library/*\"\naccept = \"any\"\ndigests = [\"sha256:{}\"]\n",
            "0".repeat(64)
        ),
    );
    let file = folder.path().join("policy.toml").display().to_string();
    let none = Evidence::default();
    let cases = [
        ("ghcr.io/good/a", ""),
        (
            "ghcr.io/bad/a",
            "rule 1 of FILE (line 2, for ghcr.io/bad/**) refuses ghcr.io/bad/a: it accepts no images; a rule before it",
        ),
        ("GHCR.IO:443/bad/a", "rule 1 of FILE"),
        (
            "quay.io/a/b",
            "refuses quay.io/a/b: no rule matches quay.io/a/b; add a [[rule]] with match = \"quay.io/a/b\"",
        ),
        ("docker.io/library/a", ""),
        (
            "docker.io/library/b",
            "rule 5 of FILE (line 15, for docker.io/library/*) refuses docker.io/library/b: neither sha256:",
        ),
        ("docker.io/library/b", "nor an index that lists it is among the rule's 1 digests"),
    ];
    for (from, expect) in cases {
        let answer = decide(&policies, from, &none);
        match answer {
            Ok(()) => assert!(expect.is_empty(), "{from}"),
            Err(text) => assert!(
                !expect.is_empty() && text.contains(&expect.replace("FILE", &file)),
                "{text}"
            ),
        }
    }
}

#[test]
fn digests_may_be_those_of_indexes() {
    let folder = tempfile::tempdir().unwrap();
    let index = index(&Digest::sha256(b"manifest"));
    let rule = "default = \"none\"\n[[rule]]\nmatch = \"**\"\naccept = \"any\"\n";
    let policies =
        policies(folder.path(), &format!("{rule}digests = \"{}\"", Digest::sha256(&index)));
    let with = Evidence { indexes: vec![index], ..Evidence::default() };
    assert!(decide(&policies, NAME, &with).is_ok());
    assert!(decide(&policies, NAME, &Evidence::default()).is_err());
}

#[test]
fn all_policies_have_to_accept() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let (any, none) = (file("any", "default = \"any\""), file("none", "default = \"none\""));
    let absent = folder.path().join("absent");
    for (files, accepts) in [
        (vec![absent.clone()], true),
        (vec![any.clone(), absent], true),
        (vec![none.clone(), any.clone()], false),
        (vec![any, none.clone()], false),
    ] {
        let policies = Policies::load(&files).unwrap();
        let answer = decide(&policies, NAME, &Evidence::default());
        assert_eq!(answer.is_ok(), accepts, "{files:?}");
        if let Err(text) = answer {
            assert!(text.contains(&none.display().to_string()), "{text}");
        }
    }
}

/// Expected values are sigstore's: `testdata/signatures/README.md` describes how they were made.
#[test]
fn signatures_made_by_sigstore() {
    let made = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/signatures");
    let folder = tempfile::tempdir().unwrap();
    let payload = std::fs::read(made.join("payload.json")).unwrap();
    let manifest = Digest::sha256(b"manifest");
    for kind in ["p256", "p384", "rsa", "ed25519"] {
        let signature = std::fs::read(made.join(format!("{kind}.sig"))).unwrap();
        let mut registry = Registry::default();
        registry.tag_signature(&manifest, &payload, &signature);
        for (key, accepts) in [(kind, true), (if kind == "p256" { "p384" } else { "p256" }, false)]
        {
            let key = made.join(format!("{key}.pub"));
            let rule = "default = \"none\"\n[[rule]]\nmatch = \"**\"\naccept = \"signed\"\n";
            let policies = policies(folder.path(), &format!("{rule}keys = {key:?}"));
            assert_eq!(ask(&policies, &registry, &manifest).is_ok(), accepts, "{kind} {key:?}");
        }
    }
}
