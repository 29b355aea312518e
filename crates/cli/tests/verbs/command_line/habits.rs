//! Command lines in the syntax of podman and docker: they have the same meaning, or the error names an alternative.

use std::fs;

use crate::Place;
use crate::container_life::containers::{Rm, ps, start};
use crate::container_life::runs::place;

#[test]
fn what_is_not_there_says_what_to_use() {
    let place = Place::new();
    let cases = [
        ("create -d debian", 125, "when `quire start` starts it"),
        ("prune", 2, "use `quire system prune`"),
        ("image nosuch", 2, "the commands of image are build, diff"),
        ("container", 125, "name a command: those of container are attach"),
        ("system nosuch", 2, "[possible values: df, prune]"),
        ("show --format x debian", 2, "`quire inspect --format TEMPLATE NAME`"),
        ("cp a b", 125, "one of the paths must be CONTAINER:PATH"),
        ("kill --latest", 125, "`quire ps` lists all"),
        ("top web", 2, "`quire exec CONTAINER ps`"),
        ("manifest inspect debian", 2, "`quire referrers NAME`"),
        ("buildx build .", 2, "use buildah or BuildKit"),
        ("unshare sh", 2, "--map-auto --map-root-user"),
        ("run --pod web debian", 125, "`--network container:NAME`"),
        ("run -P debian", 125, "use `-p HOST:CONTAINER`"),
        ("run -d --publish-all debian", 125, "use `-p HOST:CONTAINER`"),
        ("run --link db debian", 125, "`--network container:NAME`"),
        ("run --network container: debian", 125, "needs the name of a container"),
        ("run --network bridge debian", 125, "use pasta"),
        ("run --gpus all debian", 125, "use `--device PATH`"),
        ("run --umask 8 debian", 125, "use an octal mask"),
        ("run --replace debian", 125, "--name <NAME>"),
        ("bundle --label a=b debian x", 2, "the config.json of the bundle"),
        ("run --rm=perhaps debian", 125, "use true or false"),
        ("run --userns keep-id debian", 125, "so leave this out"),
        ("run --restart always debian", 125, "use --detach or --rm=false"),
        ("verify -q debian", 2, "use --quiet"),
        ("run --read-only --writable none debian --help", 125, "cannot be used with"),
        ("run --bogus debian --help", 125, "unexpected argument '--bogus'"),
        ("run -itd=true debian", 125, "-d takes no value: write -d"),
        ("rm -f=0 web", 125, "-f takes no value: leave it out"),
        ("import -v dir:x", 2, "use --verbose"),
    ];
    for (line, code, text) in cases {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(code), "{line}: {}", ran.err);
        assert!(ran.err.contains(text), "{line}: {}", ran.err);
        assert!(!ran.err.contains("as a value"), "{line}: {}", ran.err);
    }
    let ran = place.run("run --bogus debian");
    assert!(!ran.err.contains("as a value"), "{}", ran.err);
}

#[test]
fn ids_alone_are_for_other_verbs() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    for (name, more) in [("a", "--user-xattrs "), ("b", ""), ("c", "")] {
        place.out(&format!("import {more}dir:{} {name}", tree.display()));
    }
    place.out("rmi a");
    let ids = place.out("images -q");
    let [id] = ids.lines().collect::<Vec<_>>()[..] else { panic!("{ids}") };
    assert_eq!(ids, place.out("images --quiet"));
    assert_eq!(place.out("ps -aq"), "");
    let ran = place.run(&format!("rmi {id}"));
    assert!(ran.code == Some(2) && ran.err.contains("b:latest, c:latest"), "{}", ran.err);
    place.out(&format!("rmi --force {id} nothing"));
    assert_eq!(place.out("images -q"), "");
    // As the help of `images --all` says, images without a name are not listed.
    assert_eq!((place.out("images -aq"), place.out("du").contains(id)), (String::new(), true));
    assert_eq!(place.run("rmi b").code, Some(3));
}

#[test]
fn a_container_can_share_the_network_of_another() {
    let Some(place) = place() else { return };
    let network = |name: &str| {
        let pid = ps(&place, name).unwrap()["pid"].as_u64().unwrap();
        (pid, std::fs::read_link(format!("/proc/{pid}/ns/net")).unwrap())
    };
    let _guards = ["db", "job", "named", "other"].map(|it| Rm(&place, it));
    start(&place, &["--name", "db"], "sleep 60");
    let (pid, of_db) = network("db");
    start(&place, &["--name", "job", "--network", &format!("ns:/proc/{pid}/ns/net")], "sleep 60");
    start(&place, &["--name", "named", "--network", "container:db"], "sleep 60");
    start(&place, &["--name", "other"], "sleep 60");
    assert_eq!(network("job").1, of_db);
    assert_eq!(network("named").1, of_db);
    assert_ne!(network("other").1, of_db);
    // The name is recorded, and not the namespace.
    place.out("stop -t 0 named");
    place.out("rm -f db");
    let ran = place.run("start named");
    let expect = "--network container:db: start that container first";
    assert!(ran.code == Some(125) && ran.err.contains(expect), "{}", ran.err);
    start(&place, &["--name", "db"], "sleep 60");
    place.out("start named");
    assert_eq!(network("named").1, network("db").1);
    start(&place, &["--replace", "--name", "other", "--network", "host"], "sleep 60");
    let ran = place.run("run --network container:other a true");
    assert!(ran.code == Some(125) && ran.err.contains("use --network host"), "{}", ran.err);
}

#[test]
fn short_flags_are_those_of_podman() {
    let Some(place) = place() else { return };
    let host = place.tree("host", "y");
    let own = format!("{}:/host:ro", host.display());
    for volume in [own.as_str(), "./host:/host:ro"] {
        let arguments = ["run", "--quiet", "--rm", "-i", "-v", volume, "-u", "0", "a"];
        let more = ["sh", "-c", "cat /host/etc/short; echo > /host/new"];
        let ran = place.run_each(&[&arguments[..], &more].concat());
        assert_eq!(ran.out, "short\n", "{volume}: {}", ran.err);
        assert!(ran.code != Some(0) && !host.join("new").exists(), "{volume}");
    }
    for (volume, text) in [
        ("data/x:/x", "for a directory write ./data/x"),
        ("/nosuch:/x", "cannot mount \"/nosuch\" on /x: the host has no such"),
        ("/proc", "cannot mount on /proc"),
    ] {
        let ran = place.run_each(&["run", "--quiet", "-v", volume, "a", "true"]);
        assert!(ran.code == Some(125) && ran.err.contains(text), "{volume}: {}", ran.err);
    }
    // As for `-v`, the error is Quire's and not the runtime's.
    let mount = ["run", "--quiet", "--mount", "type=bind,src=/nosuch,dst=/x", "a", "true"];
    let ran = place.run_each(&mount);
    let said = "cannot mount \"/nosuch\" on /x: the host has no such";
    assert!(ran.code == Some(125) && ran.err.contains(said), "{}", ran.err);
    let _guard = Rm(&place, "a");
    start(&place, &["--name", "a"], "sleep 60");
    assert_eq!(place.out("ps -q"), "a\n");
    let ran = place.run("exec -i -u 0 a cat /etc/short");
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "short\n"), "{}", ran.err);
    // An image has the same name.
    place.out("rm -f a");
    assert_eq!(place.out("ps -aq"), "");
    assert!(place.out("images").starts_with("NAME"));
    assert!(place.out("images").contains("a:latest"));
}

/// A row of a table in `docs/docker-users.md`: a command of docker, the exit code of Quire for the same words, and a
/// part of what Quire prints.
#[derive(Debug)]
struct Habit {
    line: String,
    code: i32,
    printed: String,
}

/// Returns the rows below a heading of the page; `None` if this machine lacks the page.
fn habits(heading: &str) -> Option<Vec<Habit>> {
    let path = testing::documents::repository().join("docs/docker-users.md");
    let Ok(page) = fs::read_to_string(path) else {
        testing::skipped("the documents are not here");
        return None;
    };
    let (_, section) = page.split_once(&format!("\n### {heading}\n")).expect(heading);
    let section = section.split("\n## ").next().unwrap().split("\n### ").next().unwrap();
    // The first two lines of the table have its titles.
    let rows = section.lines().filter(|it| it.starts_with('|')).skip(2);
    let row = |row: &str| {
        let command = row.strip_prefix("| `docker ").expect(row);
        let (line, rest) = command.split_once("` | ").expect(row);
        let (code, printed) = rest.split_once(" |").expect(row);
        let printed = printed.trim().trim_end_matches('|').trim();
        Habit { line: line.into(), code: code.parse().expect(row), printed: printed.into() }
    };
    Some(rows.map(row).collect())
}

impl Habit {
    fn check(&self, place: &Place) {
        let ran = place.run(&self.line);
        assert_eq!(ran.code, Some(self.code), "{self:?}: {} {}", ran.out, ran.err);
        let printed = format!("{}{}", ran.out, ran.err);
        let is_id = |it: &str| it.len() == 12 && it.chars().all(|it| it.is_ascii_hexdigit());
        let is_expected = match self.printed.as_str() {
            "" => panic!("{self:?} has no text"),
            "(nothing)" => printed.is_empty(),
            "(an id)" => !printed.is_empty() && printed.lines().all(is_id),
            text => printed.contains(text),
        };
        assert!(is_expected, "{self:?}: {printed}");
    }
}

#[test]
fn refused_habits_of_docker_name_what_works() {
    let Some(habits) = habits("Refused") else { return };
    assert!(habits.len() >= 32, "{}", habits.len());
    let place = Place::new();
    for habit in habits {
        assert_ne!(habit.code, 0, "{habit:?}");
        // The text names a command, an option, or what to leave out.
        let ways = ["`", "--", "leave", "write ", "use "];
        assert!(ways.iter().any(|it| habit.printed.contains(it)), "{habit:?}");
        habit.check(&place);
    }
    assert!(!place.path("store").exists());
}

#[test]
fn accepted_habits_of_docker_do_the_same() {
    let Some(habits) = habits("Accepted") else { return };
    assert!(habits.len() >= 25, "{}", habits.len());
    let Some(place) = place() else { return };
    // `commit` needs an image with layers.
    place.out("export a tar:a.tar");
    place.out("import --quiet tar:a.tar app");
    place.out("rmi a");
    fs::create_dir(place.path("data")).unwrap();
    let _guard = Rm(&place, "web");
    for habit in habits {
        habit.check(&place);
    }
}
