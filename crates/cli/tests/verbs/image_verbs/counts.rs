//! The sizes, ages and leftovers that `images`, `du` and `gc` print.

use serde_json::{Value, json};
use store::{Digest, OpenOptions, RefName, Reference, Seconds, Store};

use crate::container_life::runs::{place as runnable, wait_for};
use crate::{Place, write};

fn parsed(place: &Place, line: &str) -> Value {
    serde_json::from_str(&place.out(line)).unwrap()
}

/// Gives the image `a` a manifest whose config has the time of creation, under the name `old`.
fn give_config(place: &Place) -> Digest {
    let store = Store::open(&place.path("store"), store::Who::this_process(), OpenOptions::write())
        .unwrap();
    let digest = |value: &Value| Digest::sha256(value.to_string().as_bytes());
    let config = json!({
        "created": "2021-10-11T13:06:16.5+02:00",
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": []},
    });
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": digest(&config).to_string(),
            "size": config.to_string().len(),
        },
        "layers": [],
    });
    let transaction = store.begin().unwrap();
    for value in [&config, &manifest] {
        transaction.manifest(&digest(value), value.to_string().as_bytes()).unwrap();
    }
    let name: RefName = "a".parse().unwrap();
    let image = store.refs.get(&name).unwrap().unwrap();
    let (manifest, created) = (digest(&manifest), Seconds(7));
    let reference = Reference { manifest: Some(manifest), created, ..image };
    transaction.set_ref("old".parse().unwrap(), reference);
    transaction.commit().unwrap();
    manifest
}

#[test]
fn images_have_sizes_and_ages_of_their_own() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    std::fs::hard_link(tree.join("etc/long"), tree.join("etc/again")).unwrap();
    place.out(&format!("import --quiet dir:{} a", tree.display()));
    let manifest = give_config(&place);
    let listed = parsed(&place, "images --json");
    let listed = listed.as_array().unwrap();
    assert_eq!(listed.len(), 2);
    for row in listed {
        let shown = parsed(&place, &format!("show --json {}", row["name"].as_str().unwrap()));
        assert_eq!(row["fileBytes"], 106);
        assert_eq!(row["fileBytes"], shown["fileBytes"]);
    }
    assert_eq!(listed[0]["imageCreated"], Value::Null);
    assert_eq!(listed[1]["imageCreated"], "2021-10-11T11:06:16Z");
    assert_eq!(listed[1]["created"], "1970-01-01T00:00:07Z");
    let text = place.out("images --all");
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[0].starts_with("NAME") && lines[0].ends_with("SIZE"), "{text}");
    assert!(lines[1].contains("a:latest") && lines[1].ends_with("106 B"), "{text}");
    assert!(lines[2].contains("old:latest") && lines[2].contains(" years ago "), "{text}");
    let text = place.out("images -a --digests");
    assert!(text.contains("DIGEST") && text.contains(&manifest.to_string()), "{text}");
    assert_eq!(place.out("images -aq").lines().count(), 1);
    // A name whose image cannot be read is still listed.
    let image = listed[0]["image"].as_str().unwrap();
    std::fs::remove_file(place.path("store/images").join(image)).unwrap();
    let ran = place.run("images");
    assert!(ran.code == Some(1) && ran.out.contains('?'), "{ran:?}");
    assert!(ran.err.contains("cannot determine the size of a:latest"), "{}", ran.err);
}

#[test]
fn what_interrupted_pulls_left_is_counted_and_named() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import --quiet dir:{} a", tree.display()));
    let sum = |unfinished: bool| {
        let used = parsed(&place, "du --json");
        let parts = ["objects", "data", "imageFiles", "layers", "manifests", "blobs", "containers"];
        let parts = parts.iter().map(|it| used[it].as_u64().unwrap()).sum::<u64>();
        assert_eq!(parts + used["tmp"].as_u64().unwrap(), used["total"].as_u64().unwrap());
        assert_eq!(used["unfinished"].as_u64().unwrap() >= 3 << 20, unfinished, "{used}");
        let text = place.out("du");
        let line = text.lines().find(|it| it.contains(" in all")).unwrap();
        assert_eq!(line.contains("kept compressed layers"), used["blobs"] != 0, "{text}");
    };
    sum(false);
    assert!(!place.out("gc").contains("--unfinished"));
    {
        let store =
            Store::open(&place.path("store"), store::Who::this_process(), OpenOptions::write())
                .unwrap();
        let layer = Digest::sha256(b"layer");
        let manifest = json!({"layers": [{"digest": layer.to_string()}]}).to_string();
        let digest = Digest::sha256(manifest.as_bytes());
        let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
        store.downloads.pin(&digest, Seconds(i64::try_from(now).unwrap())).unwrap();
        let transaction = store.begin().unwrap();
        transaction.manifest(&digest, manifest.as_bytes()).unwrap();
        transaction.commit().unwrap();
        store.downloads.partial(&layer).unwrap().unwrap().append(&[b'x'; 3 << 20]).unwrap();
    }
    sum(true);
    assert!(place.out("du").contains("`quire gc --unfinished`"));
    let text = place.out("gc");
    assert!(text.contains("`quire gc --unfinished` frees them"), "{text}");
    sum(true);
    let text = place.out("gc --unfinished");
    assert!(!text.contains("stay"), "{text}");
    sum(false);
}

#[test]
fn gc_keeps_what_is_new_and_what_there_is_room_for() {
    let place = Place::new();
    for name in ["a", "b"] {
        let tree = place.tree(name, name);
        place.out(&format!("import --quiet dir:{} {name}", tree.display()));
    }
    place.out("rmi a");
    for limit in ["--older-than 1h", "--keep-storage 1g", "--older-than 1d --keep-storage 0"] {
        let report = parsed(&place, &format!("gc --json {limit}"));
        assert_eq!((&report["removed"], &report["freed"]), (&json!(0), &json!(0)), "{limit}");
        assert!(report["spared"].as_u64().unwrap() > 0, "{limit}");
        let dry = parsed(&place, &format!("gc --dry-run --json {limit}"));
        assert_eq!((&dry["spared"], &dry["garbage"]), (&report["spared"], &json!([])), "{limit}");
        let text = place.out(&format!("gc {limit}"));
        let options = limit.split(' ').filter(|it| it.starts_with('-')).collect::<Vec<_>>();
        let line = format!("of unused data are kept because of {}\n", options.join(" and "));
        assert!(text.contains(&line), "{text}");
    }
    // Unused data acts as a cache: the same image adds no objects.
    let report = parsed(&place, &format!("import --json dir:{} a", place.path("a").display()));
    assert_eq!(report["objectsAdded"], 0, "{report}");
    place.out("rmi a");
    let report = parsed(&place, "gc --json --keep-storage 0");
    assert!(report["removed"].as_u64().unwrap() > 0);
    assert_eq!(report["spared"], 0);
    // `gc` never removes a name.
    assert_eq!(place.out("images -q").lines().count(), 1);
    for (limit, hint) in
        [("--older-than 24", "for example 24h or 7d"), ("--keep-storage much", "for example 512m")]
    {
        let ran = place.run(&format!("gc {limit}"));
        assert!(ran.code == Some(2) && ran.err.contains(hint), "{}", ran.err);
    }
}

#[test]
fn an_import_says_what_it_did_not_read() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    let line = format!("import dir:{} a", tree.display());
    let said = "already in the store: `quire verify`";
    assert!(!place.out(&line).contains(said));
    assert!(place.out(&line).contains(said));
    write(&tree.join("etc/more"), &[b'y'; 1000], 0o644);
    assert!(!place.out(&line).contains(said));
}

/// The store is on a separate disk, which can be unmounted when all leftovers are removed.
#[test]
fn gc_waits_for_what_ended_containers_leave() {
    let Some(from) = runnable() else { return };
    if !testing::programs(&["mkfs.ext4", "mount", "umount"]) {
        return;
    }
    let place = Place::new();
    let disk = place.path("disk");
    std::fs::File::create(&disk).unwrap().set_len(512 << 20).unwrap();
    let mkfs = testing::command("mkfs.ext4").unwrap().arg("-q").arg(&disk).status().unwrap();
    assert!(mkfs.success());
    let point = place.path("store");
    std::fs::create_dir(&point).unwrap();
    let _guard = crate::mounting::mounts::Unmount(point.clone());
    let tree = from.path("tree");
    for round in 0..6 {
        let mount = testing::command("mount")
            .unwrap()
            .arg("-o")
            .arg("loop")
            .arg(&disk)
            .arg(&point)
            .status();
        assert!(mount.unwrap().success());
        if round == 0 {
            std::fs::remove_dir(point.join("lost+found")).unwrap();
            place.out(&format!("import --quiet dir:{} a", tree.display()));
        }
        place.out("run --quiet -u 0 a -- sh -c echo>/new");
        let ran = place.run_each(&[
            "run", "--quiet", "-d", "--name", "kept", "-u", "0", "a", "--", "sleep", "60",
        ]);
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        place.out("rm --force kept");
        place.out("gc --wait");
        let umount = testing::command("umount").unwrap().arg(&point).output().unwrap();
        assert!(umount.status.success(), "{}", String::from_utf8_lossy(&umount.stderr));
    }
    wait_for("no loop device", || {
        crate::container_disk::writable::loop_devices(place.folder.path().to_str().unwrap())
            .is_empty()
    });
}
