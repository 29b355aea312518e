use std::time::Duration;

use super::super::Credential;
use super::*;

/// A directory with credential files, and with a helper `test` that stores its input in the file `kept`.
struct Place {
    folder: tempfile::TempDir,
    keyring: Keyring,
}

impl Place {
    fn new(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for (name, text) in files {
            // A file with empty content is not created.
            if !text.is_empty() {
                std::fs::create_dir_all(at(name).parent().unwrap()).unwrap();
                std::fs::write(at(name), text).unwrap();
            }
        }
        let script = format!(
            "#!/bin/sh\ncd {}\ncase $1 in\nstore) cat > kept;;\nerase) cat > erased; rm kept;;\nget) cat kept 2>/dev/null \
             || {{ echo 'credentials not found in native keychain'; exit 1; }};;\nesac\n",
            folder.path().display()
        );
        testing::script(&at("docker-credential-test"), &script);
        let keyring = Keyring {
            given: None,
            files: files.iter().map(|(name, _)| at(name)).collect(),
            helpers: vec![folder.path().to_owned()],
            helper_timeout: Duration::from_secs(20),
        };
        Self { folder, keyring }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&std::fs::read(self.path(name)).unwrap()).unwrap()
    }

    fn save(&self, host: &str) -> String {
        self.show(self.keyring.save(host, "me", &Secret::new("open:sesame".to_owned())))
    }

    fn show(&self, kept: Result<Kept, CredentialError>) -> String {
        let text = match kept {
            Ok(Kept::File(path)) => format!("in {}", path.display()),
            Ok(Kept::Helper { name, file }) => format!("by {name} of {}", file.display()),
            Err(error) => error.to_string(),
        };
        text.replace(&self.folder.path().display().to_string(), "D")
    }

    /// Returns the user name and password that a pull would find.
    fn found(&self, host: &str) -> Option<(String, String)> {
        match self.keyring.find_credential(host, "x").unwrap() {
            None => None,
            Some(Credential::Password { user, password }) => {
                Some((user, password.expose().to_owned()))
            }
            Some(other) => panic!("{other:?}"),
        }
    }
}

fn me() -> Option<(String, String)> {
    Some(("me".to_owned(), "open:sesame".to_owned()))
}

/// `printf me:open:sesame | base64`
const AUTH: &str = "bWU6b3BlbjpzZXNhbWU=";

#[test]
fn a_file_is_made_that_only_its_owner_reads() {
    let place = Place::new(&[("run/containers/auth.json", "")]);
    assert_eq!(place.save("a.io:5000"), "in D/run/containers/auth.json");
    assert_eq!(place.found("a.io:5000"), me());
    assert_eq!(place.found("a.io"), None);
    let mode = |name: &str| place.path(name).metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("run/containers/auth.json"), mode("run/containers")), (0o600, 0o700));
    let expect = json!({"auths": {"a.io:5000": {"auth": AUTH}}});
    assert_eq!(place.json("run/containers/auth.json"), expect);
    let names = std::fs::read_dir(place.path("run/containers")).unwrap().count();
    assert_eq!(names, 1, "no draft is left");
}

#[test]
fn all_else_in_a_file_stays() {
    let text = r#"{"z":{"a":[1,null]},"auths":{"b.io":{"auth":"eA==","y":1},"a.io":{"auth":"eA==","email":"e","identitytoken":"t"},"a.io/team":{"auth":"eQ=="},"https://a.io/v2/":{"auth":"eg=="}},"HttpHeaders":{"x":"y"}}"#;
    let place = Place::new(&[("auth.json", text)]);
    std::fs::set_permissions(place.path("auth.json"), Permissions::from_mode(0o644)).unwrap();
    let old = std::fs::File::open(place.path("auth.json")).unwrap();
    assert_eq!(place.save("a.io"), "in D/auth.json");
    let expect = r#"{"z":{"a":[1,null]},"auths":{"b.io":{"auth":"eA==","y":1},"a.io":{"auth":"AUTH","email":"e"},"a.io/team":{"auth":"eQ=="}},"HttpHeaders":{"x":"y"}}"#;
    let got = place.json("auth.json").to_string();
    // Two keys name the host. Exactly one entry remains, with the new credentials.
    assert_eq!(got, expect.replace("AUTH", AUTH));
    assert_eq!(place.found("a.io"), me());
    let mode = place.path("auth.json").metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // A process that has the old file open still reads the old content.
    assert_eq!(std::io::read_to_string(&old).unwrap(), text);

    let removed = place.keyring.erase("a.io").unwrap();
    assert_eq!(removed, Removed { from: vec![Kept::File(place.path("auth.json"))], left: None });
    let expect = r#"{"z":{"a":[1,null]},"auths":{"b.io":{"auth":"eA==","y":1},"a.io/team":{"auth":"eQ=="}},"HttpHeaders":{"x":"y"}}"#;
    assert_eq!(place.json("auth.json").to_string(), expect);
    let removed = place.keyring.erase("a.io").unwrap();
    assert_eq!(removed, Removed { from: Vec::new(), left: None });
}

#[test]
fn docker_hub_is_found_by_whoever_wrote_it() {
    for host in ["docker.io", "index.docker.io", "registry-1.docker.io"] {
        for (name, key) in [("auth.json", "docker.io"), ("config.json", DOCKER_HUB_KEY)] {
            let place = Place::new(&[(name, "")]);
            place.save(host);
            assert_eq!(place.json(name), json!({"auths": {key: {"auth": AUTH}}}), "{host}");
            assert_eq!(place.found("registry-1.docker.io"), me());
            assert_eq!(place.keyring.erase(host).unwrap().from.len(), 1);
            assert_eq!(place.found("registry-1.docker.io"), None);
        }
    }
}

#[test]
fn helpers_keep_what_is_theirs() {
    let entry = r#""auths":{"a.io":{"auth":"eDp5"},"b.io":{}}"#;
    let with = |rest: &str| format!("{{{entry},{rest}}}");
    for (first, second, by) in [
        (with(r#""credHelpers":{"a.io":"test"}"#), String::new(), "auth.json"),
        (with(r#""credsStore":"test""#), String::new(), "auth.json"),
        (with(r#""credsStore":"""#), with(r#""credHelpers":{"a.io":"test"}"#), "config.json"),
        (
            with(r#""x":1"#),
            r#"{"auths":{"a.io":{}},"credsStore":"test"}"#.to_owned(),
            "config.json",
        ),
    ] {
        let place = Place::new(&[("auth.json", &first), ("config.json", &second)]);
        assert_eq!(place.save("a.io"), format!("by test of D/{by}"));
        let expect = json!({"ServerURL": "a.io", "Username": "me", "Secret": "open:sesame"});
        assert_eq!(place.json("kept"), expect);
        // The old entry would have taken precedence over the helper.
        assert_eq!(place.found("a.io"), me(), "{first} {second}");
        let all = std::fs::read_to_string(place.path("auth.json")).unwrap();
        assert!(!all.contains(AUTH), "{all}");
        let removed = place.keyring.erase("a.io").unwrap();
        let helper = Kept::Helper { name: "test".to_owned(), file: place.path(by) };
        assert!(removed.from.contains(&helper), "{removed:?}");
        assert_eq!(std::fs::read_to_string(place.path("erased")).unwrap(), "a.io");
        assert_eq!(place.found("a.io"), None);
        assert_eq!(place.keyring.erase("a.io").unwrap().from, []);
    }
    let place = Place::new(&[("auth.json", r#"{"credsStore":"test"}"#)]);
    place.save("docker.io");
    assert_eq!(place.json("kept")["ServerURL"], DOCKER_HUB_KEY);
}

#[test]
fn what_other_tools_keep_is_told_of() {
    let theirs = r#"{"auths":{"a.io":{"auth":"eDp5"}}}"#;
    let place = Place::new(&[("auth.json", ""), ("config.json", theirs)]);
    place.save("a.io");
    let removed = place.keyring.erase("a.io").unwrap();
    assert_eq!(removed.left, Some(place.path("config.json")));
    assert_eq!(std::fs::read_to_string(place.path("config.json")).unwrap(), theirs);
    // The first file has no entry for a.io any more, and never had one that is left.
    let left = || place.keyring.erase_all().unwrap();
    let config = Some(place.path("config.json"));
    assert_eq!(left(), Removed { from: Vec::new(), left: config.clone() });
    place.save("b.io");
    let from = vec![Kept::File(place.path("auth.json"))];
    assert_eq!(left(), Removed { from, left: config });
    std::fs::write(place.path("config.json"), r#"{"auths":{"a.io":{}}}"#).unwrap();
    assert_eq!(left(), Removed { from: Vec::new(), left: None });
}

#[test]
fn what_cannot_be_saved_changes_nothing() {
    for (text, expect) in [
        ("{\n\"auths\": 7}", "D/auth.json is malformed at line 1"),
        ("{\n\"auths\": ", "D/auth.json is malformed at line 2"),
        (
            r#"{"credsStore":"none"}"#,
            "the credential helper docker-credential-none, which D/auth.json names, is not installed",
        ),
    ] {
        let place = Place::new(&[("auth.json", text)]);
        let got = place.save("a.io");
        // If both ways of parsing fail, either may report the error.
        assert!(got == expect || got == expect.replace("line 1", "line 2"), "{got}");
        assert_eq!(std::fs::read_to_string(place.path("auth.json")).unwrap(), text);
    }
    let place = Place::new(&[("auth.json", "")]);
    let error = place.keyring.save("a.io", "m:e", &Secret::new("x".to_owned())).unwrap_err();
    assert_eq!(error.to_string(), "a user name cannot have a colon");
    assert!(!place.path("auth.json").exists());
    let nowhere = Keyring { files: Vec::new(), ..place.keyring };
    assert!(matches!(nowhere.erase("a.io"), Err(CredentialError::NoFile)));
    // With a symlink, its target is replaced.
    let place = Place::new(&[("link.json", ""), ("auth.json", r#"{"x":1}"#)]);
    std::os::unix::fs::symlink("auth.json", place.path("link.json")).unwrap();
    place.save("a.io");
    assert!(place.path("link.json").is_symlink());
    assert_eq!(place.json("auth.json")["x"], 1);
}

#[test]
fn a_device_is_not_replaced() {
    let place = Place::new(&[("null.json", "")]);
    let path = place.path("null.json");
    // Like `/dev/null`.
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    let device = rustix::fs::makedev(1, 3);
    let kind = rustix::fs::FileType::CharacterDevice;
    if let Err(errno) = rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, device) {
        testing::skipped(&format!("no device can be made: {errno}"));
        return;
    }
    if let Err(error) = std::fs::read(&path) {
        testing::skipped(&format!("no device can be opened here: {error}"));
        return;
    }
    assert_eq!(place.keyring.erase("a.io").unwrap().from, []);
    assert_eq!(place.save("a.io"), "cannot write D/null.json");
    assert!(!path.metadata().unwrap().is_file());
}

#[test]
fn a_symlink_without_a_target_gets_one() {
    let place = Place::new(&[("link.json", "")]);
    std::os::unix::fs::symlink("second", place.path("link.json")).unwrap();
    std::os::unix::fs::symlink(place.path("new/auth.json"), place.path("second")).unwrap();
    assert_eq!(place.save("a.io"), "in D/link.json");
    assert!(place.path("link.json").is_symlink() && place.path("second").is_symlink());
    assert_eq!(place.json("new/auth.json"), json!({"auths": {"a.io": {"auth": AUTH}}}));
    assert_eq!(place.found("a.io"), me());
    // A loop has no target.
    let place = Place::new(&[("loop.json", "")]);
    std::os::unix::fs::symlink("loop.json", place.path("loop.json")).unwrap();
    assert_eq!(place.save("a.io"), "cannot read D/loop.json");
    assert!(place.path("loop.json").is_symlink());
}

#[test]
fn logins_at_once_keep_each_others_entries() {
    let place = Place::new(&[("auth.json", "")]);
    let hosts: Vec<String> = (0..16).map(|number| format!("r{number}.io")).collect();
    let at_once = |work: &(dyn Fn(&str) + Sync)| {
        let start = std::sync::Barrier::new(hosts.len());
        std::thread::scope(|scope| {
            for host in &hosts {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    work(host);
                });
            }
        });
    };
    // The first round makes the file, the second one replaces it.
    for _ in 0..2 {
        at_once(&|host| assert_eq!(place.save(host), "in D/auth.json"));
        for host in &hosts {
            assert_eq!(place.found(host), me(), "{host}");
        }
    }
    at_once(&|host| assert_eq!(place.keyring.erase(host).unwrap().from.len(), 1, "{host}"));
    assert_eq!(place.json("auth.json"), json!({"auths": {}}));
    let names = std::fs::read_dir(place.folder.path()).unwrap().count();
    assert_eq!(names, 2, "only the file and the helper are there");
}
