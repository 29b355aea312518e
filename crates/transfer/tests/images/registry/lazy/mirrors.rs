//! Indexes that mirrors have: which index is used, and what a mirror that lies can do.

use oci::registry::{PEER_HEADER, PEER_LAYERS};
use store::IndexWindows;

use super::*;

/// Whether a server has the index under its tag, in the list of referrers, or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lists {
    Tag,
    List,
    Nothing,
}

/// How a mirror changes its responses.
type Change = fn(&Stage, &Request, Reply) -> Reply;

fn unchanged(_: &Stage, _: &Request, reply: Reply) -> Reply {
    reply
}

/// Answers as a server that has the index in this way.
fn answer(stage: &Stage, lists: Lists, request: &Request) -> Reply {
    let path = request.path.split('?').next().unwrap();
    if path.ends_with(".quire") {
        return match lists {
            Lists::Tag => reply(200)
                .header("content-type", MANIFEST)
                .body(&stage.manifests[&stage.artifact.to_string()]),
            _ => reply(404),
        };
    }
    if path.contains("/referrers/") && lists == Lists::Nothing {
        return reply(404);
    }
    let path = path.to_owned();
    stage.answer(&Request { path, ..request.clone() })
}

/// The image and the index that a server has.
struct Side<'a> {
    stage: &'a Arc<Stage>,
    lists: Lists,
}

/// A registry with an image, and a mirror that has an index of it.
struct Pair {
    registry: Server,
    mirror: Server,
    hosts: Hosts,
    of_registry: Arc<Stage>,
    of_mirror: Arc<Stage>,
}

impl Pair {
    fn new(of_registry: Lists, mirror: Stage, lists: Lists, change: Change) -> Self {
        let stage = Arc::new(Stage::new(b"two"));
        let registry = Side { stage: &stage, lists: of_registry };
        let of_mirror = Arc::new(mirror);
        Self::with(&registry, &Side { stage: &of_mirror, lists }, change)
    }

    fn with(registry: &Side<'_>, mirror: &Side<'_>, change: Change) -> Self {
        let Side { stage, lists: of_registry } = *registry;
        let Side { stage: of_mirror, lists } = *mirror;
        let answering = Arc::clone(stage);
        let registry = Server::start(move |request, _| {
            let has_none = of_registry == Lists::Nothing
                && answering.of_index.iter().any(|it| request.path.contains(it));
            if has_none { reply(404) } else { answer(&answering, of_registry, request) }
        });
        let answering = Arc::clone(of_mirror);
        let mirror = Server::start(move |request, _| {
            let names = [&answering.artifact.to_string()];
            let mut names = names.into_iter().chain(&answering.of_index);
            let is_of_index = request.path.contains(".quire")
                || request.path.contains("/referrers/")
                || names.any(|it| request.path.contains(it));
            let found = if is_of_index { answer(&answering, lists, request) } else { reply(404) };
            change(&answering, request, found).header(PEER_HEADER, PEER_LAYERS)
        });
        let text = format!(
            "server = \"http://{}\"\n[host.\"http://{}\"]\ncapabilities = [\"pull\", \"resolve\"]\n",
            registry.host(),
            mirror.host()
        );
        let hosts = Hosts::new(&registry.host(), &text);
        let (of_registry, of_mirror) = (Arc::clone(stage), Arc::clone(of_mirror));
        Self { registry, mirror, hosts, of_registry, of_mirror }
    }

    fn pull(&self, home: &Home, which: &str, trust: TrustIndex) -> Result<Digest, LazyPullError> {
        let reference = format!("{}/app{which}", self.registry.host());
        let (policies, name) = (Policies::load(&[]).unwrap(), "app".parse().unwrap());
        let settings = self.hosts.settings();
        let pulled = pull_by(home, &reference, &policies, &name, trust, &settings);
        pulled.map(|it| match it {
            LazyPulled::Image { source: LazySource::Index(index), .. } => index,
            other => panic!("the store was empty: {other:?}"),
        })
    }

    /// Pulls by the tag. The registry is asked for blobs of the index only if it has one.
    fn pull_usual(&self) -> Result<Digest, LazyPullError> {
        self.pull(&Home::new(), ":1", TrustIndex::Default)
    }
}

/// The windows of a mirror's index are fetched at once, because the mirror may be gone later.
#[test]
fn an_index_of_a_mirror_has_its_windows() {
    for lists in [Lists::Tag, Lists::List] {
        let pair = Pair::new(Lists::Nothing, Stage::new(b"two"), lists, unchanged);
        let home = Home::new();
        let index = pair.pull(&home, ":1", TrustIndex::Default).unwrap();
        assert_eq!(index, pair.of_mirror.artifact, "{lists:?}");
        let manifest = Some(&pair.of_mirror.manifest);
        let named = home.store.refs.get(&"app".parse().unwrap()).unwrap().unwrap();
        let devices = home.store.lazy_devices(&named.image).unwrap();
        assert_eq!(devices.len(), 2);
        for device in devices {
            let found = home.store.lazy_devices.index_for(&device, manifest).unwrap().unwrap();
            assert!(matches!(found.1, IndexWindows::Groups(_)), "{lists:?}");
        }
    }
}

/// The registry's index may have a hot pack, and its author may push.
#[test]
fn an_index_of_the_registry_precedes_one_of_a_mirror() {
    for of_registry in [Lists::Tag, Lists::List] {
        for lists in [Lists::Tag, Lists::List] {
            let pair = Pair::new(of_registry, Stage::new(b"tow"), lists, unchanged);
            assert_ne!(pair.of_registry.artifact, pair.of_mirror.artifact);
            let index = pair.pull_usual().unwrap();
            assert_eq!(index, pair.of_registry.artifact, "{of_registry:?}, {lists:?}");
        }
    }
}

/// A mirror cannot widen the trust in indexes.
#[test]
fn an_image_that_is_named_by_its_digest_takes_no_unsigned_index_of_a_mirror() {
    let pair = Pair::new(Lists::Nothing, Stage::new(b"two"), Lists::List, unchanged);
    let pinned = format!("@{}", pair.of_mirror.manifest);
    let pull = |trust| pair.pull(&Home::new(), &pinned, trust);
    for trust in [TrustIndex::Default, TrustIndex::Signed, TrustIndex::Digest(digest(b"other"))] {
        let error = pull(trust).unwrap_err();
        let is_none = matches!(error, LazyPullError::Index(LazyFetchError::None(_)));
        assert!(is_none, "{trust:?}: {error}");
    }
    let seen = pair.mirror.seen();
    let is_of_index =
        |it: &Request| pair.of_mirror.of_index.iter().any(|blob| it.path.contains(blob));
    assert!(!seen.iter().any(is_of_index), "blobs of an untrusted index were fetched");
    let artifact = pair.of_mirror.artifact;
    for trust in [TrustIndex::Repository, TrustIndex::Digest(artifact)] {
        assert_eq!(pull(trust).unwrap(), artifact);
    }
}

/// A mirror that lies costs only time: if the registry has an index, it is used, and otherwise the result is that
/// without a mirror.
#[test]
fn a_mirror_that_lies_costs_only_time() {
    fn flip(mut reply: Reply) -> Reply {
        reply.body.iter_mut().for_each(|it| *it ^= 1);
        reply
    }
    fn of_blob(request: &Request, blob: &str, reply: Reply, change: fn(Reply) -> Reply) -> Reply {
        // The query has the artifact type, which is like the tag.
        let path = request.path.split('?').next().unwrap();
        if path.contains(blob) { change(reply) } else { reply }
    }
    // The config is first, then the start, then windows and recipes.
    let ways: [(&str, Change); 6] = [
        ("another start", |it, request, reply| of_blob(request, &it.of_index[1], reply, flip)),
        ("other windows", |it, request, reply| of_blob(request, &it.of_index[2], reply, flip)),
        ("no windows", |it, request, found| {
            of_blob(request, &it.of_index[2], found, |_| reply(404))
        }),
        ("cut windows", |it, request, found| {
            of_blob(request, &it.of_index[2], found, |it| {
                let half = it.body.len() / 2;
                it.cut(half)
            })
        }),
        ("no JSON", |_, request, found| {
            of_blob(request, ".quire", found, |it| it.body("nonsense"))
        }),
        ("the manifest of the image", |it, request, found| {
            let is_tag = request.path.split('?').next().unwrap().ends_with(".quire");
            let other = || reply(200).header("content-type", MANIFEST).body(&it.image.manifest);
            if is_tag { other() } else { found }
        }),
    ];
    let [right, other] = [b"two", b"tow"].map(|it| Arc::new(Stage::new(it)));
    fn side(stage: &Arc<Stage>, lists: Lists) -> Side<'_> {
        Side { stage, lists }
    }
    for (way, change) in ways {
        // By its tag, the index of the registry is found before the mirror's is fetched.
        let pair = Pair::with(&side(&right, Lists::List), &side(&other, Lists::Tag), change);
        assert_eq!(pair.pull_usual().unwrap(), right.artifact, "{way}");
        let pair = Pair::with(&side(&right, Lists::Nothing), &side(&right, Lists::Tag), change);
        let pulled = pair.pull_usual();
        // A manifest that does not name the image is ignored. This mirror also has a list, with the index.
        if way == "no JSON" || way == "the manifest of the image" {
            assert_eq!(pulled.unwrap(), right.artifact, "{way}");
            continue;
        }
        let error = pulled.unwrap_err();
        let is_none = matches!(error, LazyPullError::Index(LazyFetchError::None(_)));
        assert!(is_none, "{way}: {error}");
    }
}

/// The registry's list is requested while the index of the mirror is fetched.
#[test]
fn the_list_of_the_registry_costs_no_further_round_trip() {
    let (stage, of_mirror) = (Arc::new(Stage::new(b"two")), Arc::new(Stage::new(b"two")));
    let [is_fetched, is_over] = [false; 2].map(|it| Arc::new(AtomicBool::new(it)));
    let (answering, fetched, over) = (Arc::clone(&stage), Arc::clone(&is_fetched), is_over.clone());
    let registry = Server::start(move |request, _| {
        while request.path.contains("/referrers/")
            && !fetched.load(Ordering::SeqCst)
            && !over.load(Ordering::SeqCst)
        {
            std::thread::sleep(Duration::from_millis(5));
        }
        answer(&answering, Lists::Nothing, request)
    });
    let (answering, fetched) = (Arc::clone(&of_mirror), Arc::clone(&is_fetched));
    let mirror = Server::start(move |request, _| {
        if request.path.contains(&answering.of_index[1]) {
            fetched.store(true, Ordering::SeqCst);
        }
        answer(&answering, Lists::Tag, request).header(PEER_HEADER, PEER_LAYERS)
    });
    let text = format!(
        "server = \"http://{}\"\n[host.\"http://{}\"]\ncapabilities = [\"pull\", \"resolve\"]\n",
        registry.host(),
        mirror.host()
    );
    let hosts = Hosts::new(&registry.host(), &text);
    let (home, name) = (Home::new(), "app".parse().unwrap());
    let (policies, reference) =
        (Policies::load(&[]).unwrap(), format!("{}/app:1", registry.host()));
    let long = Duration::from_secs(3600);
    let settings = Settings { stall: long, patience: long, ..hosts.settings() };
    let (home, policies, name, settings) = (&home, &policies, &name, &settings);
    let pulled = std::thread::scope(|scope| {
        let _release = Release(&is_over);
        let pulling = scope.spawn(move || {
            pull_by(home, &reference, policies, name, TrustIndex::Default, settings)
        });
        wait_for("the pull", || pulling.is_finished());
        pulling.join().unwrap()
    });
    let LazyPulled::Image { source: LazySource::Index(index), .. } = pulled.unwrap() else {
        panic!()
    };
    assert_eq!(index, of_mirror.artifact);
}

/// A mirror that does not respond delays nothing if the registry lists an index.
#[test]
fn a_mirror_that_does_not_respond_is_not_awaited() {
    let of_mirror = Arc::new(Stage::new(b"tow"));
    for hangs in [".quire", "/referrers/", &of_mirror.of_index[1]] {
        let stage = Arc::new(Stage::new(b"two"));
        let is_over = Arc::new(AtomicBool::new(false));
        let answering = Arc::clone(&stage);
        let registry = Server::start(move |request, _| answer(&answering, Lists::List, request));
        let (answering, over) = (Arc::clone(&of_mirror), Arc::clone(&is_over));
        let hanging = hangs.to_owned();
        let mirror = Server::start(move |request, _| {
            while request.path.contains(&hanging) && !over.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(5));
            }
            answer(&answering, Lists::List, request).header(PEER_HEADER, PEER_LAYERS)
        });
        let text = format!(
            "server = \"http://{}\"\n[host.\"http://{}\"]\ncapabilities = [\"pull\", \"resolve\"]\n",
            registry.host(),
            mirror.host()
        );
        let hosts = Hosts::new(&registry.host(), &text);
        let long = Duration::from_secs(3600);
        let settings = Settings { stall: long, patience: long, ..hosts.settings() };
        let reference = format!("{}/app:1", registry.host());
        let (home, policies) = (Home::new(), Policies::load(&[]).unwrap());
        let name = "app".parse().unwrap();
        let (home, policies, name, settings) = (&home, &policies, &name, &settings);
        let pulled = std::thread::scope(|scope| {
            let _release = Release(&is_over);
            let trust = TrustIndex::Default;
            let pulling =
                scope.spawn(move || pull_by(home, &reference, policies, name, trust, settings));
            wait_for("the pull", || pulling.is_finished());
            pulling.join().unwrap()
        });
        let LazyPulled::Image { source: LazySource::Index(index), .. } = pulled.unwrap() else {
            panic!()
        };
        assert_eq!(index, stage.artifact, "{hangs}");
    }
}

/// The index of a mirror is used although the registry does not respond. Without one, the registry is asked again.
#[test]
fn a_busy_registry_is_asked_again_only_if_mirrors_have_no_index() {
    for (lists, expect, requests) in [(Lists::Tag, b"tow", 1), (Lists::Nothing, b"two", 2)] {
        let [stage, of_mirror] = [b"two", b"tow"].map(|it| Arc::new(Stage::new(it)));
        let answering = Arc::clone(&stage);
        let busy = AtomicBool::new(true);
        let registry = Server::start(move |request, _| {
            match request.path.contains("/referrers/") && busy.swap(false, Ordering::SeqCst) {
                true => reply(503),
                false => answer(&answering, Lists::List, request),
            }
        });
        let mirror = Server::start(move |request, _| {
            answer(&of_mirror, lists, request).header(PEER_HEADER, PEER_LAYERS)
        });
        let text = format!(
            "server = \"http://{}\"\n[host.\"http://{}\"]\ncapabilities = [\"pull\", \"resolve\"]\n",
            registry.host(),
            mirror.host()
        );
        let hosts = Hosts::new(&registry.host(), &text);
        let (home, policies) = (Home::new(), Policies::load(&[]).unwrap());
        let (name, reference) = ("app".parse().unwrap(), format!("{}/app:1", registry.host()));
        let trust = TrustIndex::Default;
        let pulled = pull_by(&home, &reference, &policies, &name, trust, &hosts.settings());
        let LazyPulled::Image { source: LazySource::Index(index), .. } = pulled.unwrap() else {
            panic!()
        };
        assert_eq!(index, Stage::new(expect).artifact, "{lists:?}");
        let seen = registry.lines();
        let asked = seen.iter().filter(|it| it.contains("/referrers/")).count();
        assert_eq!(asked, requests, "{seen:?}");
    }
}

/// An ordinary pull asks the registry for nothing else because a mirror may have an index, even if the store has
/// other layers.
#[test]
fn an_ordinary_pull_does_not_ask_the_registry_for_indexes() {
    let pair = Pair::new(Lists::Tag, Stage::new(b"two"), Lists::Tag, unchanged);
    for indexes in [Indexes::Forget, Indexes::Keep] {
        let home = Home::new();
        pull_whole(&home, &pair.registry.host(), "app", indexes, &pair.hosts.settings());
        let seen = pair.registry.lines();
        let is_of_index = |it: &String| it.contains(".quire") || it.contains("/referrers/");
        assert!(!seen.iter().any(is_of_index), "{seen:?}");
        let kept = home.store.downloads.kept_index(&pair.of_mirror.manifest).unwrap();
        // The index that was made is the one that `quire index --push` would push.
        let made = (indexes == Indexes::Keep).then_some(pair.of_mirror.artifact);
        assert_eq!(kept, made);
    }
}

fn pull_whole(
    home: &Home,
    host: &str,
    name: &str,
    indexes: Indexes,
    settings: &Settings,
) -> Pulled {
    let reference: Reference = format!("{host}/app:1").parse().unwrap();
    let (policies, name) = (Policies::load(&[]).unwrap(), name.parse().unwrap());
    let import = ImportOptions { name: Some(&name), form: Form::Tar, ..usual_wishes() };
    let options = PullSettings {
        import,
        layers: Layers::Forget,
        indexes,
        policies: &policies,
        syncs: Syncs::AtOnce,
    };
    let registry = Registry::new(&reference, settings).unwrap();
    let environment = home.environment();
    transfer::pull::pull(&home.store, &registry, &reference, &environment, &options).unwrap()
}

/// Pulls an image that keeps its index, twice. Returns whether there is an index, and checks that the second pull
/// fetches no blob.
#[track_caller]
fn keeps(home: &Home, image: Served) -> bool {
    let manifest = digest(&image.manifest);
    let server = Server::start(move |request, _| image.answer(request));
    let pull = |name| pull_whole(home, &server.host(), name, Indexes::Keep, &settings());
    pull("app");
    let seen = server.seen().len();
    assert!(matches!(pull("app"), Pulled::UpToDate { .. }));
    // Another name of the image needs no blob either.
    pull("other");
    let again = server.lines().split_off(seen);
    assert!(!again.iter().any(|it| it.contains("/blobs/")), "{again:?}");
    home.store.downloads.kept_index(&manifest).unwrap().is_some()
}

#[test]
fn pulls_that_keep_an_index_fetch_no_layer_again() {
    let layers = || {
        vec![
            layer(&first_layer()),
            layer(&Tar::from_text("d empty")),
            layer(&Tar::default().file("two", &text(100_000))),
        ]
    };
    assert!(keeps(&Home::new(), served(layers())));
    // A layer that can have no index.
    let tar = Tar::default().file("three", &text(100_000)).bytes();
    let of_one_frame = Layer { blob: zstd::bulk::compress(&tar, 1).unwrap(), tar };
    let with = layers().into_iter().chain([of_one_frame]).collect();
    assert!(!keeps(&Home::new(), served(with)));
    // A layer that came without an index.
    let home = Home::new();
    let base = Arc::new(served(vec![layer(&first_layer())]));
    let path = base.path(0);
    let server = Server::start(move |request, _| base.answer(request));
    pull_whole(&home, &server.host(), "base", Indexes::Forget, &settings());
    let image = served(layers());
    let server = Server::start({
        let image = served(layers());
        move |request, _| image.answer(request)
    });
    pull_whole(&home, &server.host(), "above", Indexes::Keep, &settings());
    assert!(!server.lines().iter().any(|it| it.contains(&path)), "the layer was fetched again");
    assert!(!keeps(&home, image));
}

/// An image that was pulled without its index gets one when that needs no layer.
#[test]
fn an_index_that_can_be_made_is_kept_later() {
    let stage = Stage::new(b"two");
    let home = Home::new();
    let (server, manifest) = {
        let image = Arc::clone(&stage.image);
        (Server::start(move |request, _| image.answer(request)), stage.manifest)
    };
    let import = ImportOptions { form: Form::Tar, index: true, ..usual_wishes() };
    pull_with(&home, &server.host(), "1", Layers::Forget, import);
    assert_eq!(home.store.downloads.kept_index(&manifest).unwrap(), None);
    let again = pull_whole(&home, &server.host(), "app", Indexes::Keep, &settings());
    assert!(matches!(again, Pulled::UpToDate { .. }));
    assert_eq!(home.store.downloads.kept_index(&manifest).unwrap(), Some(stage.artifact));
}
