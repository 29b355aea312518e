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
            LazyPulled::Image { index, .. } => index,
            LazyPulled::UpToDate { .. } => panic!("the store was empty"),
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
        if request.path.contains(blob) { change(reply) } else { reply }
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
        ("the manifest of the image", |it, request, found| match request.path.contains(".quire") {
            true => reply(200).header("content-type", MANIFEST).body(&it.image.manifest),
            false => found,
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
    let LazyPulled::Image { index, .. } = pulled.unwrap() else { panic!() };
    assert_eq!(index, of_mirror.artifact);
}

/// An ordinary pull asks the registry for nothing else because a mirror may have an index.
#[test]
fn an_ordinary_pull_does_not_ask_the_registry_for_indexes() {
    let pair = Pair::new(Lists::Tag, Stage::new(b"two"), Lists::Tag, unchanged);
    let home = Home::new();
    let reference: Reference = format!("{}/app:1", pair.registry.host()).parse().unwrap();
    let (policies, name) = (Policies::load(&[]).unwrap(), "app".parse().unwrap());
    let import = ImportOptions { name: Some(&name), form: Form::Tar, ..usual_wishes() };
    let options = PullSettings {
        import,
        layers: Layers::Forget,
        indexes: Indexes::Keep,
        policies: &policies,
        syncs: Syncs::AtOnce,
    };
    let registry = Registry::new(&reference, &pair.hosts.settings()).unwrap();
    let pulled =
        transfer::pull::pull(&home.store, &registry, &reference, &home.environment(), &options);
    pulled.unwrap();
    let seen = pair.registry.lines();
    assert!(!seen.iter().any(|it| it.contains(".quire") || it.contains("/referrers/")), "{seen:?}");
    // The index that was made is the one that `quire index --push` would push.
    let manifest = pair.of_mirror.manifest;
    let kept = transfer::lazy::stored_index(&home.store, &manifest).unwrap().unwrap();
    assert_eq!(kept.digest, pair.of_mirror.artifact);
    // A second pull leaves it there.
    transfer::pull::pull(&home.store, &registry, &reference, &home.environment(), &options)
        .unwrap();
    assert_eq!(home.store.downloads.kept_index(&manifest).unwrap(), Some(kept.digest));
}
