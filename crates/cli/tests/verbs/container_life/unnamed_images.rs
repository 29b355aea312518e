//! Images without a name: `commit` without a name, and `untag`. Needs root.

use std::fs;

use crate::Place;
use crate::container_life::commit::{Waiting, place};

/// Commits the container `web` without a name, and returns the id.
fn commit(place: &Place) -> String {
    // With the same files, the image would have the id of the image below.
    place.out("exec web -- sh -c :>/new");
    let id = commit_as_it_is(place);
    assert!(id.len() >= 64 && id.bytes().all(|it| it.is_ascii_hexdigit()), "{id}");
    id
}

fn commit_as_it_is(place: &Place) -> String {
    let change = "CMD [\"sh\",\"-c\",\"exit 9\"]";
    let ran = place.run_each(&["commit", "--iidfile", "id", "--change", change, "web"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let id = ran.out.trim_end_matches('\n').to_owned();
    assert_eq!(fs::read_to_string(place.path("id")).unwrap(), id);
    id
}

/// Returns the ids of the images that are listed without a name.
fn dangling(place: &Place) -> String {
    place.out("images -q --no-trunc --filter dangling=true")
}

#[test]
fn a_commit_without_a_name_has_its_configuration_and_stays() {
    let Some(place) = place() else { return };
    let _web = Waiting::start(&place, "web", &[], "a");
    let id = commit(&place);
    place.out("gc");
    assert_eq!(dangling(&place), format!("{id}\n"));
    let format = "{{.Repository}}:{{.Tag}} {{.Names}}";
    let listed = place.run_each(&["images", "--filter", "dangling=true", "--format", format]);
    assert_eq!(listed.out, "<none>:<none> []\n");
    assert_eq!(place.run(&format!("run --rm {id}")).code, Some(9));
    assert_eq!(place.run(&format!("run --rm {}", &id[..12])).code, Some(9));
    // A name takes the place of none, and `untag` takes it away again.
    place.out(&format!("tag {id} named"));
    assert_eq!(dangling(&place), "");
    assert_eq!(place.run("run --rm named").code, Some(9));
    place.out("untag named");
    place.out("gc");
    assert_eq!(dangling(&place), format!("{id}\n"));
    assert_eq!(place.run(&format!("run --rm {id}")).code, Some(9));
    assert_eq!(place.run("run --rm --pull never named").code, Some(125));
    place.out(&format!("rmi {id}"));
    assert_eq!(dangling(&place), "");
}

#[test]
fn a_commit_of_the_same_files_is_named_by_its_manifest() {
    let Some(place) = place() else { return };
    place.out("create --name web a sh");
    let digest = commit_as_it_is(&place);
    assert!(digest.starts_with("sha256:"), "{digest}");
    assert_eq!(place.run(&format!("run --rm {digest}")).code, Some(9));
    assert_eq!(dangling(&place), place.out("images -q --no-trunc a"));
    place.out(&format!("rmi {digest}"));
    assert_eq!(dangling(&place), "");
    assert_eq!(place.out("images --format {{.Repository}}"), "a\n");
}

#[test]
fn prune_removes_images_without_a_name_unless_a_container_uses_them() {
    let Some(place) = place() else { return };
    let _web = Waiting::start(&place, "web", &[], "a");
    let id = commit(&place);
    place.out(&format!("create --name user {id}"));
    place.out("image prune --force");
    assert_eq!(dangling(&place), format!("{id}\n"));
    place.out("rm user");
    assert!(place.out("image prune --force").starts_with(&format!("Deleted Images\n{id}\n")));
    assert_eq!(dangling(&place), "");
    assert_eq!(place.out("images -q a").lines().count(), 1);
}

#[test]
fn untag_removes_the_given_names_only() {
    let Some(place) = place() else { return };
    place.out("tag a b");
    place.out("tag a c:1");
    place.out("import --quiet tar:base.tar --change CMD=x other");
    place.out("untag a b c:1");
    assert_eq!(place.out("images --format {{.Repository}}:{{.Tag}}"), "a:latest\nother:latest\n");
    for (line, expect) in [
        ("untag a other", "\"other\" is not a name of this image"),
        ("untag a nosuch", "nosuch"),
        ("untag nosuch", "there is no image \"nosuch\""),
    ] {
        let ran = place.run(line);
        assert!(ran.code != Some(0) && ran.err.contains(expect), "{line}: {}", ran.err);
    }
    assert_eq!(dangling(&place), "");
}
