//! Lists of images, and images of directories that get a configuration.

use serde_json::{Value, json};

use crate::Place;

fn shown(place: &Place, name: &str) -> Value {
    serde_json::from_str(&place.out(&format!("show --json {name}"))).unwrap()
}

/// Imports a source with changes.
fn import(place: &Place, source: &str, name: &str, changes: &[&str]) {
    let mut words = vec!["import", "--quiet"];
    words.extend(changes.iter().flat_map(|it| ["--change", it]));
    words.extend([source, name]);
    let ran = place.run_each(&words);
    assert_eq!(ran.code, Some(0), "{words:?}: {}", ran.err);
}

const CHANGES: [&str; 4] =
    ["CMD [\"sh\", \"-c\", \"echo ok\"]", "ENV A=1 B=2", "LABEL team=shop", "USER 5"];

/// The settings are those that `docker commit --change` makes of these lines.
fn settings() -> Value {
    json!({
        "Cmd": ["sh", "-c", "echo ok"],
        "Env": ["A=1", "B=2"],
        "Labels": {"team": "shop"},
        "User": "5",
    })
}

#[test]
fn a_directory_gets_a_configuration_and_a_layer() {
    let place = Place::new();
    place.tree("tree", "x");
    place.out("import dir:tree plain");
    import(&place, "dir:tree", "app", &CHANGES);
    let (plain, app) = (shown(&place, "plain"), shown(&place, "app"));
    // The layer changes nothing in the files.
    assert_eq!(plain["image"], app["image"]);
    assert!(plain["manifest"].is_null() && plain["config"].is_null());
    assert_eq!(app["config"]["config"], settings());
    assert_eq!(app["manifest"]["layers"].as_array().unwrap().len(), 1);
    assert_eq!(place.out("cat app:/etc/long"), "x".repeat(100));
    // A layout, which `push` sends as well, has all of it.
    place.out("export app oci:layout:1");
    place.out("import oci:layout:1 again");
    let again = shown(&place, "again");
    assert_eq!(again["config"], app["config"]);
    assert_eq!(again["image"], app["image"]);
    // The same source and changes give the same manifest.
    import(&place, "dir:tree", "twice", &CHANGES);
    assert_eq!(shown(&place, "twice")["manifestDigest"], app["manifestDigest"]);
    import(&place, "dir:tree", "other", &CHANGES[..1]);
    assert_ne!(shown(&place, "other")["manifestDigest"], app["manifestDigest"]);
    place.out("rmi plain app again twice other");
    assert!(place.out("gc").contains("freed"));
    place.out("fsck");
}

#[test]
fn a_tar_gets_a_configuration() {
    let place = Place::new();
    place.tree("tree", "x");
    place.out("import dir:tree plain");
    place.out("export plain tar:plain.tar");
    import(&place, "tar:plain.tar", "app", &CHANGES);
    let app = shown(&place, "app");
    assert_eq!(app["config"]["config"], settings());
    assert_eq!(app["image"], shown(&place, "plain")["image"]);
    place.out("import tar:plain.tar bare");
    assert!(shown(&place, "bare")["config"]["config"].is_null());
    place.out("export app oci:layout");
    for (line, expect) in [
        ("import --change RUN=5 dir:tree x", "is not one of CMD"),
        ("import --change USER dir:tree x", "USER needs a value"),
    ] {
        let ran = place.run(line);
        assert!(ran.code == Some(2) && ran.err.contains(expect), "{line}: {}", ran.err);
    }
    for (source, change, expect) in [
        ("oci:layout", "USER 5", "--change is only for dir: and tar:"),
        ("dir:tree", "STOPSIGNAL NONE", "STOPSIGNAL"),
        ("dir:none", "USER 5", "none"),
    ] {
        let ran = place.run_each(&["import", "--change", change, source, "x"]);
        assert!(ran.code == Some(2) && ran.err.contains(expect), "{source}: {}", ran.err);
    }
    assert!(!place.out("images").contains("x:latest"));
}

/// Source: podman-images(1).
#[test]
fn images_are_filtered_and_formatted() {
    let place = Place::new();
    place.tree("tree", "x");
    place.tree("more", "y");
    import(&place, "dir:tree", "registry.example/lib/app:1", &["LABEL team=shop"]);
    import(&place, "dir:more", "app:2", &["LABEL team=ops", "LABEL x=y"]);
    place.out("import dir:tree base");
    let names = |options: &[&str]| {
        let form = ["images", "--format", "{{.Repository}}:{{.Tag}}"];
        let ran = place.run_each(&[&form, options].concat());
        assert_eq!(ran.code, Some(0), "{options:?}: {}", ran.err);
        ran.out.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let (one, two, base) = ("registry.example/lib/app:1", "app:2", "base:latest");
    let id = shown(&place, two)["image"].as_str().unwrap().to_owned();
    let digest = shown(&place, two)["manifestDigest"].as_str().unwrap().to_owned();
    let cases: &[(&[&str], &[&str])] = &[
        (&[], &[two, base, one]),
        (&["app"], &[two, one]),
        (&["lib/app"], &[one]),
        (&["app:2"], &[two]),
        (&["nothing"], &[]),
        (&["--filter", "reference=app:*"], &[two, one]),
        (&["-f", "reference=b*", "-f", "reference=app:2"], &[two, base]),
        (&["-f", "label=team"], &[two, one]),
        (&["-f", "label=team=shop"], &[one]),
        (&["-f", "label=team", "-f", "label=x"], &[two]),
        (&["-f", "label!=team"], &[base]),
        (&["-f", "dangling=true"], &[]),
        (&["-f", "dangling=false", "base"], &[base]),
        (&["-f", &format!("id={}", &id[..12])], &[two]),
        (&["-f", &format!("digest={digest}")], &[two]),
        (&["-f", "until=2000-01-01"], &[]),
        (&["-f", "readonly=true"], &[]),
        (&["--sort", "repository"], &[two, base, one]),
        (&["--sort", "tag"], &[one, two, base]),
    ];
    for (options, expect) in cases {
        assert_eq!(names(options), *expect, "{options:?}");
    }
    let print = |options: &[&str]| {
        let ran = place.run_each(&[&["images"], options].concat());
        assert_eq!(ran.code, Some(0), "{options:?}: {}", ran.err);
        ran.out
    };
    assert_eq!(print(&["-q", "app:2"]).trim(), &id[..12]);
    assert_eq!(
        print(&["app:2", "--format", "{{.ID}} {{.Digest}}"]),
        format!("{} {digest}\n", &id[..12])
    );
    let form = "table {{.Repository}}\\t{{.Labels}}";
    assert_eq!(
        print(&["app:2", "--format", form]),
        "REPOSITORY  LABELS\napp         map[team:ops x:y]\n"
    );
    assert_eq!(print(&["app:2", "-n", "--format", form]), "app         map[team:ops x:y]\n");
    assert_eq!(print(&["-n"]), print(&[]).split_once('\n').unwrap().1);
    assert_eq!(print(&["--format", "table"]), print(&[]));
    // `etc/long` and `etc/short` have 106 bytes.
    assert_eq!(print(&["base", "--format", "{{.Size}}"]), "106 B\n");
    let all: Value = serde_json::from_str(&print(&["--format", "json"])).unwrap();
    let rows = all.as_array().unwrap();
    place.out("tag app:2 app:3");
    assert_eq!(rows.len(), 3);
    assert_eq!((&rows[1]["Names"], &rows[1]["Size"]), (&json!([base]), &json!(106)));
    assert_eq!(rows[2]["Labels"], json!({"team": "shop"}));
    let all: Value = serde_json::from_str(&print(&["app", "--format", "json"])).unwrap();
    assert_eq!(all[0]["Names"], json!([two, "app:3"]));
    for (options, expect) in [
        (&["--format", "{{.Name}}"][..], "the fields are ID, Id, Repository"),
        (&["-f", "dangling=yes"], "use true or false"),
        (&["-f", "since=none"], "there is no image \"none\""),
        (&["-f", "size=1"], "there is no filter \"size\""),
    ] {
        let ran = place.run_each(&[&["images"], options].concat());
        assert!(ran.code != Some(0) && ran.err.contains(expect), "{options:?}: {}", ran.err);
    }
}
