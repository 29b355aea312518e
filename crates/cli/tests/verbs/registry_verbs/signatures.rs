//! `sign`, `push` with signatures, and the policies that demand them, with openssl as the other program.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::logins::on_a_terminal;
use super::registries::{place as place_with_layers, start};
use crate::{Place, Ran, write};

/// Passphrase of the keys in `testdata/signatures`.
const PASSPHRASE: &str = "correct horse";

/// Returns a file of `testdata/signatures`.
fn made(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/signatures").join(name)
}

/// Makes a key pair with openssl, `NAME.key` and `NAME.pub`.
pub(super) fn key(place: &Place, name: &str, options: &[&str]) {
    let [private, public] = ["key", "pub"].map(|it| place.path(&format!("{name}.{it}")));
    let run = |command: &mut Command| {
        let out = command.output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    };
    let openssl = || testing::command("openssl").expect("the test asked for it");
    run(openssl().arg("genpkey").arg("-out").arg(&private).args(options));
    run(openssl().args(["pkey", "-pubout", "-in"]).arg(&private).arg("-out").arg(&public));
    write(&private, &std::fs::read(&private).unwrap(), 0o600);
}

pub(super) const P256: [&str; 4] = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"];

/// Copies an encrypted key as `cosign.key`, because only its owner may have permissions for it.
fn cosign_key(place: &Place, name: &str) {
    write(&place.path("cosign.key"), &std::fs::read(made(name)).unwrap(), 0o600);
    write(&place.path("passphrase"), format!("{PASSPHRASE}\nnot this\n").as_bytes(), 0o600);
}

/// Writes a policy with one rule, for signed images.
pub(super) fn policy(place: &Place, pattern: &str, key: &str, more: &str) {
    let text = format!(
        "default = \"none\"\n[[rule]]\nmatch = \"{pattern}\"\naccept = \"signed\"\nkeys = \"{key}\"\n{more}\n"
    );
    write(&place.path("policy.toml"), text.as_bytes(), 0o644);
}

/// Uses an image as the policy allows: an export evaluates the policy.
fn uses(place: &Place, name: &str) -> Ran {
    let _removed = std::fs::remove_file(place.path("used.tar"));
    place.run(&format!("--policy policy.toml export {name} tar:used.tar"))
}

pub(super) fn check_refused(place: &Place, name: &str, why: &str) {
    let ran = uses(place, name);
    assert_eq!(ran.code, Some(4), "{name}: {}", ran.err);
    assert!(ran.err.contains(why), "{name}: {}", ran.err);
}

pub(super) fn check_accepted(place: &Place, name: &str) {
    let ran = uses(place, name);
    assert_eq!(ran.code, Some(0), "{name}: {}", ran.err);
}

/// Returns the report, or the last event.
pub(super) fn json(text: &str) -> Value {
    let last = || serde_json::from_str(text.lines().last().unwrap()).unwrap();
    serde_json::from_str(text).unwrap_or_else(|_| last())
}

/// Returns the file with the signatures of an image without a manifest.
pub(super) fn signatures_of(place: &Place, name: &str) -> PathBuf {
    let shown = serde_json::from_str::<Value>(&place.out(&format!("show --json {name}"))).unwrap();
    place.path(&format!("store/blobs/{}.signatures", shown["image"].as_str().unwrap()))
}

#[test]
fn an_image_made_here_is_used_only_if_it_is_signed() {
    if !testing::programs(&["openssl"]) {
        return;
    }
    let place = Place::new();
    place.tree("tree", "x");
    place.tree("other", "y");
    place.out("import --quiet dir:tree app");
    place.out("import --quiet dir:other other");
    for name in ["ours", "theirs"] {
        key(&place, name, &P256);
    }
    policy(&place, "local", "ours.pub", "");
    check_refused(
        &place,
        "app",
        "the store has no signature of the image; sign it with the private key",
    );
    let signed = json(&place.out("sign --json app --key ours.key"));
    assert_eq!((&signed["manifest"], &signed["identity"]), (&Value::Null, &Value::Null));
    assert_eq!(signed["alreadySigned"], false);
    check_accepted(&place, "app");
    check_refused(&place, "other", "no signature");
    assert_eq!(json(&place.out("sign --json app --key ours.key"))["alreadySigned"], true);
    let shown = |line: &str| serde_json::from_str::<Value>(&place.out(line)).unwrap();
    let listed = shown("--policy policy.toml show --json app");
    let expect = json!([{
        "signed": [signed["image"]], "ofImage": true, "identity": null,
        "key": place.path("ours.pub").display().to_string(),
    }]);
    // The policy's path is relative, and so is the key's.
    let mut found = listed["signatures"].clone();
    found[0]["key"] = place.path(found[0]["key"].as_str().unwrap()).display().to_string().into();
    assert_eq!(found, expect);
    assert!(place.out("show app").contains("signature for no repository"));

    // openssl verifies the signature of the id.
    let stored: Value =
        serde_json::from_slice(&std::fs::read(signatures_of(&place, "app")).unwrap()).unwrap();
    for part in ["payload", "signature"] {
        let text = stored["signatures"][0][part].as_str().unwrap();
        write(&place.path("base64"), text.as_bytes(), 0o644);
        let mut openssl = testing::command("openssl").unwrap();
        openssl.args(["base64", "-d", "-A", "-in", "base64", "-out", part]);
        assert!(openssl.current_dir(place.folder.path()).status().unwrap().success());
    }
    let mut openssl = testing::command("openssl").unwrap();
    openssl.args(["dgst", "-sha256", "-verify", "ours.pub", "-signature", "signature", "payload"]);
    assert!(openssl.current_dir(place.folder.path()).status().unwrap().success());

    // Another name of the same files has the same signature, and other files have none.
    place.out("import --quiet dir:tree again");
    check_accepted(&place, "again");
    place.out("filter --quiet --exclude etc/short app less");
    check_refused(&place, "less", "no signature");

    // The key is withdrawn, or the rule wants a name that the signature does not state.
    policy(&place, "local", "theirs.pub", "");
    check_refused(&place, "app", "1 signature(s), but none by theirs.pub");
    let named = "identity = \"ghcr.io/ours/app\"";
    policy(&place, "local", "ours.pub", named);
    check_refused(&place, "app", "the signature states no identity");
    place.out("sign app --key ours.key --identity ghcr.io/theirs/app");
    check_refused(&place, "app", "ours.pub signed it");
    place.out("sign app --key ours.key --identity ghcr.io/ours/app:1.2");
    check_accepted(&place, "app");

    policy(&place, "local", "ours.pub", "");
    place.out("sign other --key ours.key");
    let (file, others) = (signatures_of(&place, "app"), signatures_of(&place, "other"));
    let whole = std::fs::read(&file).unwrap();
    let replace = |bytes: &[u8]| {
        std::fs::remove_file(&file).unwrap();
        write(&file, bytes, 0o444);
    };
    replace(&std::fs::read(&others).unwrap());
    check_refused(&place, "app", "but for other images");
    replace(&whole[..whole.len() / 2]);
    let ran = uses(&place, "app");
    assert_eq!(ran.code, Some(2), "{}", ran.err);
    assert!(ran.err.contains("are damaged: sign the image again"), "{}", ran.err);
    assert!(place.run("show app").err.contains("are damaged"));
    place.out("sign app --key ours.key");
    check_accepted(&place, "app");
    replace(b"");
    assert_eq!(uses(&place, "app").code, Some(2));
    std::fs::remove_file(&file).unwrap();
    check_refused(&place, "app", "no signature");
    write(&file, &whole, 0o444);
    check_accepted(&place, "app");

    place.out("fsck");
    for name in ["app", "again"] {
        place.out(&format!("rmi {name}"));
    }
    place.out("gc");
    assert!(!file.exists() && others.exists());
    // The signature does not come back with the image.
    place.out("import --quiet dir:tree app");
    check_refused(&place, "app", "no signature");
}

/// A signature of a manifest does not make the files alone trusted under other settings, and the reverse.
#[test]
fn an_image_with_a_manifest_is_signed_with_its_settings() {
    if !testing::programs(&["openssl"]) {
        return;
    }
    let place = place_with_layers(1);
    key(&place, "ours", &P256);
    policy(&place, "local", "ours.pub", "");
    check_refused(&place, "a:1", "no signature");
    let ran = place.run("sign --json a:1 --key ours.key");
    assert!(ran.err.contains("names no repository"), "{}", ran.err);
    let signed = json(&ran.out);
    assert!(signed["manifest"].as_str().unwrap().starts_with("sha256:"));
    check_accepted(&place, "a:1");
    let of_id = signatures_of(&place, "a:1");
    let name = signed["manifest"].as_str().unwrap().replace(':', "-");
    let of_manifest = place.path(&format!("store/blobs/{name}.signatures"));
    // Each of the two is needed: the manifest could name other files, and the files could run another command.
    for file in [&of_id, &of_manifest] {
        let whole = std::fs::read(file).unwrap();
        std::fs::remove_file(file).unwrap();
        check_refused(&place, "a:1", "for other images");
        write(file, &whole, 0o444);
        check_accepted(&place, "a:1");
    }
    // A signature of the manifest is not enough, wherever it is stored.
    std::fs::remove_file(&of_id).unwrap();
    std::fs::rename(&of_manifest, &of_id).unwrap();
    check_refused(&place, "a:1", "for other images");
}

/// Signatures that come with pulls have separate places, however many they are.
#[test]
fn a_pull_with_other_signatures_keeps_those_made_here() {
    if !testing::programs(&["openssl"]) {
        return;
    }
    let place = place_with_layers(1);
    key(&place, "ours", &P256);
    policy(&place, "local", "ours.pub", "");
    place.out("sign a:1 --key ours.key");
    check_accepted(&place, "a:1");
    let store = store::Store::open(
        &place.path("store"),
        store::Who::this_process(),
        store::OpenOptions::write(),
    )
    .unwrap();
    let found = store.resolve("a:1").unwrap();
    let manifest = found.manifest.unwrap();
    for turn in 0..3 {
        // As a registry's user can attach them: they parse, and state this manifest.
        let payload = json!({"critical": {
            "identity": {"docker-reference": format!("ghcr.io/a{turn}")},
            "image": {"docker-manifest-digest": manifest.to_string()},
            "type": "cosign container image signature",
        }});
        let payload =
            base64::Engine::encode(&base64::engine::general_purpose::STANDARD, payload.to_string());
        let junk = |it: u32| {
            let signature = base64::Engine::encode(
                &base64::engine::general_purpose::STANDARD,
                it.to_le_bytes(),
            );
            json!({"form": "simple-signing", "payload": payload, "signature": signature})
        };
        let junk: Vec<_> = (0..32).map(junk).collect();
        let text = json!({"origins": [], "indexes": [], "signatures": junk}).to_string();
        let pulled = oci::policy::Evidence::decode(text.as_bytes()).unwrap();
        assert_eq!(pulled.signatures.len(), 32);
        transfer::evidence::keep(&pulled, &store, &manifest).unwrap();
        transfer::evidence::keep(&pulled, &store, &found.image).unwrap();
    }
    check_accepted(&place, "a:1");
    let listed = json(&place.out("show --json a:1"))["signatures"].as_array().unwrap().len();
    assert_eq!(listed, 2 * (64 + 1));
}

/// Records of refs and origins are not signed, so a program that writes them could give other files a signed manifest.
#[test]
fn other_files_do_not_get_a_signed_manifest() {
    if !testing::programs(&["openssl"]) {
        return;
    }
    let place = place_with_layers(1);
    place.tree("evil", "y");
    place.out("import --quiet dir:evil evil");
    key(&place, "ours", &P256);
    policy(&place, "local", "ours.pub", "");
    place.out("sign a:1 --key ours.key");
    check_accepted(&place, "a:1");
    let store = store::Store::open(
        &place.path("store"),
        store::Who::this_process(),
        store::OpenOptions::write(),
    )
    .unwrap();
    let manifest = store.resolve("a:1").unwrap().manifest;
    let image = store.resolve("evil").unwrap().image;
    let import = store.begin().unwrap();
    import.add_origin(image, store::Origin { manifest, repository: None });
    let (form, created) = (store::Form::Objects, store::Seconds(1));
    import.set_ref("a:1".parse().unwrap(), store::Reference { image, manifest, form, created });
    import.commit().unwrap();
    drop(store);
    check_refused(&place, "a:1", "for other images");
}

/// Returns the number of signatures of a manifest in a registry that openssl verifies with a key.
fn verified(place: &Place, repository: &str, digest: &str, public: &Path) -> usize {
    verified_at(place, &format!("docker://{repository}"), repository, digest, public)
}

/// Returns the number of signatures of a manifest at a place of skopeo that openssl verifies with a key. The documents
/// must be those of cosign's specification. (Debian's skopeo fetches them, but its verification is disabled.)
pub(super) fn verified_at(
    place: &Place,
    source: &str,
    repository: &str,
    digest: &str,
    public: &Path,
) -> usize {
    let folder = place.path("signatures");
    let _old = std::fs::remove_dir_all(&folder);
    let mut skopeo = testing::command("skopeo").expect("the test asked for it");
    skopeo.args(["--insecure-policy", "copy", "--quiet", "--src-tls-verify=false"]);
    let tag = format!("{}.sig", digest.replace(':', "-"));
    skopeo.arg(format!("{source}:{tag}")).arg(format!("dir:{}", folder.display()));
    if !skopeo.output().unwrap().status.success() {
        return 0;
    }
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    let manifest: Value = serde_json::from_slice(&read("manifest.json")).unwrap();
    let is_ed25519 = public.ends_with("ed.pub");
    let is_verified = |layer: &&Value| {
        assert_eq!(layer["mediaType"], "application/vnd.dev.cosign.simplesigning.v1+json");
        let blob = layer["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
        let payload: Value = serde_json::from_slice(&read(blob)).unwrap();
        let critical = &payload["critical"];
        assert_eq!(critical["type"], "cosign container image signature");
        assert_eq!(critical["image"]["docker-manifest-digest"], digest);
        let reference = critical["identity"]["docker-reference"].as_str().unwrap();
        assert!(reference.starts_with(repository), "{reference}");
        let text = layer["annotations"]["dev.cosignproject.cosign/signature"].as_str().unwrap();
        std::fs::write(folder.join("base64"), text).unwrap();
        let run = |arguments: &[&str]| {
            let mut openssl = testing::command("openssl").unwrap();
            openssl.args(arguments).current_dir(&folder).output().unwrap().status.success()
        };
        assert!(run(&["base64", "-d", "-A", "-in", "base64", "-out", "signature"]));
        let public = public.to_str().unwrap();
        if is_ed25519 {
            let verify = ["pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", public];
            run(&[&verify[..], &["-sigfile", "signature", "-in", blob]].concat())
        } else {
            run(&["dgst", "-sha256", "-verify", public, "-signature", "signature", blob])
        }
    };
    manifest["layers"].as_array().unwrap().iter().filter(is_verified).count()
}

#[test]
fn signatures_that_are_pushed_are_accepted() {
    if !testing::programs(&["openssl", "skopeo"]) {
        return;
    }
    let from = place_with_layers(1);
    let Some(daemon) = start(&from) else { return };
    for (name, options) in [
        ("ours", &P256[..]),
        ("theirs", &P256[..]),
        ("ed", &["-algorithm", "ED25519"][..]),
        ("rsa", &["-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"][..]),
    ] {
        key(&from, name, options);
    }
    cosign_key(&from, "cosign.key");
    let target = format!("{}/team/app:1", daemon.host);
    let repository = format!("{}/team/app", daemon.host);
    let pushed = json(&from.out(&format!("push --json a:1 {target}")));
    assert_eq!(pushed["signatures"], 0);
    let digest = pushed["manifest"].as_str().unwrap();
    let count = |repository: &str, public: &Path| verified(&from, repository, digest, public);
    let ours = from.path("ours.pub");
    assert_eq!(count(&repository, &ours), 0);
    let line = "push --json --sign-by-sigstore-private-key";
    // The same key makes no second signature of the same image.
    for _ in 0..2 {
        let pushed = json(&from.out(&format!("{line} ours.key a:1 {target}")));
        assert_eq!((&pushed["signatures"], &pushed["manifest"]), (&1.into(), &digest.into()));
        assert_eq!(count(&repository, &ours), 1);
    }
    assert_eq!(count(&repository, &from.path("theirs.pub")), 0);
    // Further signatures keep the earlier ones: RSA and Ed25519, and cosign's key with its passphrase in a file.
    let keys = ["ed.key", "rsa.key", "cosign.key --sign-passphrase-file passphrase"];
    for key in keys {
        assert!(from.out(&format!("{line} {key} a:1 {target}")).contains("\"signatures\":"));
    }
    let others = ["ed.pub", "rsa.pub"].map(|it| from.path(it));
    let cosign = made("cosign.pub").canonicalize().unwrap();
    for public in [&ours, &others[0], &others[1], &cosign] {
        assert_eq!(count(&repository, public), 1, "{}", public.display());
    }

    for (public, accepts) in
        [("ours.pub", true), ("rsa.pub", true), ("ed.pub", true), ("theirs.pub", false)]
    {
        let to = Place::new();
        std::fs::copy(from.path(public), to.path(public)).unwrap();
        policy(&to, &format!("{}/team/*", daemon.host), public, "");
        let ran = to.run(&format!("--policy policy.toml pull --quiet {target}"));
        assert_eq!(ran.code, Some(if accepts { 0 } else { 4 }), "{public}: {}", ran.err);
        if accepts {
            check_accepted(&to, &target);
        }
    }

    // A signature that was made before the push goes along with the same manifest, to the repository that it names.
    let to = Place::new();
    to.out(&format!("pull --quiet --keep-layers {target} b:1"));
    for name in ["ours.key", "ours.pub"] {
        std::fs::copy(from.path(name), to.path(name)).unwrap();
    }
    to.out(&format!("sign b:1 --key ours.key --identity {}/team/copy", daemon.host));
    for (name, expected) in [("copy", 1), ("third", 0)] {
        let repository = format!("{}/team/{name}", daemon.host);
        let pushed = json(&to.out(&format!("push --json b:1 {repository}:2")));
        let expect = (&expected.into(), &true.into());
        assert_eq!((&pushed["signatures"], &pushed["unchanged"]), expect);
        assert_eq!(count(&repository, &ours), expected, "{name}");
    }
}

#[test]
fn key_files_and_passphrases() {
    if !testing::programs(&["openssl", "script"]) {
        return;
    }
    let place = Place::new();
    place.tree("tree", "x");
    place.out("import --quiet dir:tree app");
    cosign_key(&place, "cosign.key");
    let line = "--verbose --verbose sign --json app --key";
    let run = |key: &str, passphrase: Option<&str>| {
        let arguments = format!("{line} {key}");
        let mut command = place.command(&arguments.split(' ').collect::<Vec<_>>());
        command.env_remove("COSIGN_PASSWORD");
        if let Some(text) = passphrase {
            command.env("COSIGN_PASSWORD", text);
        }
        // Without a terminal to ask on.
        let mut detached = Command::new("setsid");
        detached.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => detached.env(name, value),
                None => detached.env_remove(name),
            };
        }
        let output = detached.current_dir(place.folder.path()).output().unwrap();
        let ran = Ran::from_output(&output);
        for secret in [PASSPHRASE, "wrong horse"] {
            assert!(!ran.err.contains(secret) && !ran.out.contains(secret), "{}", ran.err);
        }
        ran
    };
    let check = |key: &str, passphrase: Option<&str>, why: &str| {
        let ran = run(key, passphrase);
        assert_eq!(ran.code, Some(2), "{key}: {}", ran.err);
        assert!(ran.err.contains(why), "{key}: {}", ran.err);
    };
    check("cosign.key", Some("wrong horse"), "passphrase is wrong, or it is damaged");
    check("cosign.key", None, "--passphrase-file FILE or $COSIGN_PASSWORD has the passphrase");
    assert_eq!(run("cosign.key", Some(PASSPHRASE)).code, Some(0));
    // The file precedes the variable, and only its first line counts.
    let ran = run("cosign.key --passphrase-file passphrase", Some("wrong horse"));
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert_eq!(json(&ran.out)["alreadySigned"], true);
    check("cosign.key --passphrase-file nosuch", None, "--passphrase-file nosuch: cannot read it");

    key(&place, "plain", &P256);
    assert_eq!(run("plain.key", None).code, Some(0));
    let bytes = std::fs::read(place.path("plain.key")).unwrap();
    for mode in [0o640, 0o604, 0o620] {
        write(&place.path("plain.key"), &bytes, mode);
        check("plain.key", None, "other users have permissions for it");
    }
    let encrypted = std::fs::read(place.path("cosign.key")).unwrap();
    write(&place.path("cosign.key"), &encrypted, 0o644);
    let ran = run("cosign.key", Some(PASSPHRASE));
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.err.contains("`chmod 600 cosign.key`"), "{}", ran.err);

    key(&place, "p384", &["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384"]);
    check("p384.key", None, "has another type than ECDSA P-256");
    check("p384.pub", None, "it is not a private key");
    check("nosuch.key", None, "--key nosuch.key: cannot read it");
    check(".", None, "it is a directory");
    write(&place.path("large.key"), &vec![b'-'; (64 << 10) + 1], 0o600);
    check("large.key", None, "it has more than 65536 bytes");

    // On a terminal, Quire asks, and the answer is not shown.
    let line = "sign app --key cosign.key --identity ghcr.io/ours/app";
    let answer = format!("{PASSPHRASE}\n");
    let (shown, echoes) = on_a_terminal(&place, line, &[("passphrase of cosign.key: ", &answer)]);
    assert!(shown.contains("ended with 0"), "{shown}");
    assert!(!shown.contains(PASSPHRASE) && echoes, "{shown}");
}

/// Whether the verifier has a policy besides the administrator's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Policy {
    Named,
    None,
}

/// Calls the verifier as containerd does.
fn verify(place: &Place, policy: Policy, name: &str, digest: &str, descriptor: &str) -> Ran {
    use std::io::Write as _;
    let program = place.path("quire-image-verifier");
    if !program.exists() {
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_quire"), &program).unwrap();
    }
    let mut command = Command::new(program);
    command.args(["-name", name, "-digest", digest]);
    command.args(["-stdin-media-type", "application/vnd.oci.descriptor.v1+json"]);
    command.env_remove("QUIRE_POLICY").current_dir(place.folder.path());
    if policy == Policy::Named {
        command.env("QUIRE_POLICY", place.path("policy.toml"));
    }
    let piped = std::process::Stdio::piped;
    let mut child = command.stdin(piped()).stdout(piped()).stderr(piped()).spawn().unwrap();
    // It may refuse the arguments before it reads.
    let _closed = child.stdin.take().unwrap().write_all(descriptor.as_bytes());
    Ran::from_output(&child.wait_with_output().unwrap())
}

#[test]
fn engines_ask_the_same_policy() {
    if !testing::programs(&["openssl"]) {
        return;
    }
    let place = place_with_layers(1);
    let Some(daemon) = start(&place) else { return };
    for name in ["ours", "theirs"] {
        key(&place, name, &P256);
    }
    let repository = format!("{}/team/app", daemon.host);
    let name = format!("{repository}:1");
    let pushed = json(&place.out(&format!("push --json a:1 {name}")));
    let digest = pushed["manifest"].as_str().unwrap().to_owned();
    let descriptor = |digest: &str| json!({"digest": digest, "size": 1}).to_string();
    let ask = |name: &str| verify(&place, Policy::Named, name, &digest, &descriptor(&digest));
    let check = |name: &str, code: i32, said: &str| {
        let ran = ask(name);
        assert_eq!(ran.code, Some(code), "{name}: {} {}", ran.out, ran.err);
        assert!(ran.out.contains(said), "{name}: {}", ran.out);
    };
    let text = |text: &str| write(&place.path("policy.toml"), text.as_bytes(), 0o644);
    text("default = \"any\"");
    check(&name, 0, "accepted");
    text("default = \"none\"");
    check(&name, 1, "no rule matches");
    let rule = |digest: &str| {
        text(&format!(
            "default = \"none\"\n[[rule]]\nmatch = \"{repository}\"\naccept = \"any\"\ndigests = \"{digest}\""
        ));
    };
    rule(&digest);
    check(&name, 0, "accepted");
    rule(&format!("sha256:{}", "0".repeat(64)));
    check(&name, 1, "is among the rule's 1 digests");

    policy(&place, &repository, "ours.pub", "");
    check(&name, 1, "no signature of the image");
    let line = "push --quiet --sign-by-sigstore-private-key";
    place.out(&format!("{line} theirs.key a:1 {name}"));
    check(&name, 1, "1 signature(s), but none by");
    place.out(&format!("{line} ours.key a:1 {name}"));
    check(&name, 0, "signed by");
    // The same image in another repository, whose tag of signatures is a copy.
    policy(&place, &format!("{}/team/*", daemon.host), "ours.pub", "");
    let copy = format!("{}/team/copy:1", daemon.host);
    place.out(&format!("push --quiet a:1 {copy}"));
    check(&copy, 1, "no signature of the image");
    if testing::programs(&["skopeo"]) {
        let tag = format!("{}.sig", digest.replace(':', "-"));
        let mut skopeo = testing::command("skopeo").unwrap();
        skopeo.args(["--insecure-policy", "copy", "--quiet", "--src-tls-verify=false"]);
        skopeo.args(["--dest-tls-verify=false", "--preserve-digests"]);
        skopeo.arg(format!("docker://{repository}:{tag}"));
        skopeo.arg(format!("docker://{}/team/copy:{tag}", daemon.host));
        let out = skopeo.output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        check(&copy, 1, "signed it as");
    }

    // Arguments that contradict each other, and a policy that cannot be read.
    let other = format!("sha256:{}", "0".repeat(64));
    let ran = verify(&place, Policy::Named, &name, &digest, &descriptor(&other));
    assert_eq!(ran.code, Some(1), "{}", ran.out);
    assert!(ran.out.contains("the descriptor has the digest"), "{}", ran.out);
    let ran = verify(&place, Policy::Named, &name, &digest, "");
    assert_eq!(ran.code, Some(1), "{}", ran.out);
    text("default = ");
    check(&name, 1, "cannot use the policy");
    std::fs::remove_file(place.path("policy.toml")).unwrap();
    check(&name, 1, "there is no policy");
    if !Path::new("/etc/quire/policy.toml").exists() {
        let ran = verify(&place, Policy::None, &name, &digest, &descriptor(&digest));
        assert_eq!(ran.code, Some(1), "{} {}", ran.out, ran.err);
        assert!(ran.out.contains("there is no policy: write"), "{}", ran.out);
    }
}

/// A registry that never answers: containerd would wait as long.
#[test]
fn the_verifier_gives_up_in_time() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap().to_string();
    let place = Place::new();
    std::fs::copy(made("cosign.pub"), place.path("cosign.pub")).unwrap();
    policy(&place, &format!("{host}/**"), "cosign.pub", "");
    let digest = format!("sha256:{}", "a".repeat(64));
    let descriptor = json!({"digest": digest}).to_string();
    let ran = verify(&place, Policy::Named, &format!("{host}/app:1"), &digest, &descriptor);
    assert_eq!(ran.code, Some(1), "{}", ran.out);
    assert!(ran.out.contains("no decision within 9 seconds"), "{}", ran.out);
}
