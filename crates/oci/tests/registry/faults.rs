//! Pulls and pushes through a proxy that does to them whatever networks, registries and what stands before them do, by a plan
//! that a number decides. Whatever happens: an image is the very one or there is none, and errors say what happened.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hasher as _};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Instant;

use quire_oci as oci;

use oci::pull::{Layers, PullError, Pulled, default_name, pull};
use oci::push::PushError;

use super::daemon::Daemon;
use super::fake::{Reply, Request, Server, forward, reply};
use super::home::Home;
use super::pulls::{NOW, Served, image, layer, push_over, push_to, served};
use super::rounds::rounds;
use super::*;

/// Settings for bad weather: stalls are to cost little.
fn impatient() -> Settings {
    Settings { stall: Duration::from_millis(400), ..settings() }
}

/// Numbers that depend on nothing but `seed`.
struct Dice(u64);

impl Dice {
    fn new(seed: impl std::hash::Hash) -> Self {
        let mut hasher = DefaultHasher::new();
        seed.hash(&mut hasher);
        Self(hasher.finish() | 1)
    }

    /// From 0 to `bound`, without `bound` itself.
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from((self.0 >> 16) % bound.max(1) as u64).unwrap()
    }
}

/// What may happen to a request.
#[derive(Debug, Clone, Copy)]
enum Trouble {
    Delay,
    Slow,
    RateLimit,
    Status(u16),
    /// The same, but the registry has done what was asked.
    LateStatus(u16),
    /// The registry gets a part of the body.
    Lost,
    ResetBefore,
    ResetAfter,
    ResetWithin,
    Truncated,
    Stall,
    /// More comes than there is.
    Longer,
    /// `Content-Length` says more than there is, or less.
    Announced(bool),
    Flipped,
    WrongDigest,
    Elsewhere,
    ElsewhereRefuses,
}

const TROUBLES: [Trouble; 21] = [
    Trouble::Delay,
    Trouble::Slow,
    Trouble::RateLimit,
    Trouble::Status(500),
    Trouble::Status(502),
    Trouble::Status(503),
    Trouble::Status(504),
    Trouble::LateStatus(502),
    Trouble::Lost,
    Trouble::ResetBefore,
    Trouble::ResetAfter,
    Trouble::ResetWithin,
    Trouble::Truncated,
    Trouble::Stall,
    Trouble::Longer,
    Trouble::Announced(true),
    Trouble::Announced(false),
    Trouble::Flipped,
    Trouble::WrongDigest,
    Trouble::Elsewhere,
    Trouble::ElsewhereRefuses,
];

/// What a proxy does, and what it has seen.
struct Weather {
    seed: u64,
    /// Of a hundred requests, how many get into trouble.
    chance: usize,
    /// How long tokens live, if there are any. Clients are told nothing of it.
    token_life: Option<Duration>,
    upstream: String,
    /// How often each was asked for.
    count: Mutex<BTreeMap<String, u64>>,
    tokens: Mutex<Vec<Instant>>,
    /// Where blobs are led to.
    elsewhere: String,
    done: Mutex<Vec<String>>,
}

impl Weather {
    fn answer(&self, request: &Request) -> Reply {
        let host = request.header("host").unwrap_or_default();
        if request.path.starts_with("/token?") {
            return self.token(request);
        }
        let number = {
            let mut count = self.count.lock().unwrap();
            let number = count.entry(request.line()).or_default();
            *number += 1;
            *number
        };
        let mut dice = Dice::new((self.seed, &request.method, &request.path, number));
        if !self.is_known(request) {
            let challenge = format!("Bearer realm=\"http://{host}/token\",service=\"faults\"");
            return reply(401).header("www-authenticate", &challenge);
        }
        if dice.below(100) >= self.chance {
            return self.upstream(request);
        }
        let trouble = TROUBLES[dice.below(TROUBLES.len())];
        self.done.lock().unwrap().push(format!("{trouble:?}: {}", request.line()));
        self.trouble(trouble, request, &mut dice)
    }

    fn upstream(&self, request: &Request) -> Reply {
        forward(&self.upstream, request, request.body.len()).unwrap()
    }

    fn trouble(&self, trouble: Trouble, request: &Request, dice: &mut Dice) -> Reply {
        match trouble {
            Trouble::RateLimit => {
                return reply(429)
                    .header("retry-after", if dice.below(4) == 0 { "1" } else { "0" });
            }
            Trouble::Status(status) => return reply(status).body("<html>sorry</html>"),
            Trouble::ResetBefore => return reply(500).reset(None),
            Trouble::Lost if !request.body.is_empty() => {
                // What the registry says to that nobody hears.
                drop(forward(&self.upstream, request, dice.below(request.body.len())));
                return reply(500).reset(None);
            }
            Trouble::Elsewhere | Trouble::ElsewhereRefuses if is_blob(request) => {
                let gone = if matches!(trouble, Trouble::Elsewhere) { "" } else { "&expired" };
                let to = format!("http://{}/storage?{}{gone}", self.elsewhere, request.path);
                return reply(307).header("location", &to);
            }
            _ => {}
        }
        let mut reply = self.upstream(request);
        let length = reply.body.len();
        match trouble {
            Trouble::Delay => {
                return reply.delay(Duration::from_millis(20 + dice.below(150) as u64));
            }
            Trouble::Slow => return reply.pace(Duration::from_millis(2)),
            Trouble::LateStatus(status) => return super::fake::reply(status),
            Trouble::ResetAfter => return reply.reset(None),
            Trouble::ResetWithin => return reply.reset(Some(dice.below(length))),
            Trouble::Truncated => return reply.cut(dice.below(length)),
            Trouble::Stall => return reply.stall(dice.below(length)),
            Trouble::Longer => {
                reply.body.extend(noise(1 + dice.below(70_000)));
                if dice.below(2) == 0 {
                    return reply.header("connection", "close");
                }
            }
            Trouble::Announced(is_more) if request.method != "HEAD" => {
                let lie = match is_more {
                    true => length + 1 + dice.below(9999),
                    false => dice.below(length),
                };
                return reply.header("content-length", &lie.to_string()).cut(length);
            }
            Trouble::Flipped if length > 0 => {
                let at = dice.below(length);
                reply.body[at] ^= 1 << dice.below(8);
            }
            Trouble::WrongDigest => {
                reply.headers.retain(|(name, _)| name != "docker-content-digest");
                return reply.header("docker-content-digest", &digest(b"another").to_string());
            }
            _ => {}
        }
        reply
    }

    /// A token is the number of its making.
    fn token(&self, request: &Request) -> Reply {
        self.check_nobody(request);
        let mut tokens = self.tokens.lock().unwrap();
        tokens.push(Instant::now());
        let mut dice = Dice::new((self.seed, "token", tokens.len()));
        if dice.below(100) < self.chance / 2 {
            self.done.lock().unwrap().push("no token".to_owned());
            return reply([500, 503, 429][dice.below(3)]);
        }
        reply(200).body(format!("{{\"token\":\"t{}\"}}", tokens.len() - 1))
    }

    fn is_known(&self, request: &Request) -> bool {
        let Some(life) = self.token_life else { return true };
        let token = request.header("authorization").and_then(|it| it.strip_prefix("Bearer t"));
        let number = token.and_then(|it| it.parse::<usize>().ok());
        let tokens = self.tokens.lock().unwrap();
        number.and_then(|it| tokens.get(it)).is_some_and(|since| since.elapsed() < life)
    }

    /// What is for the registry alone goes nowhere else.
    fn check_nobody(&self, request: &Request) {
        if request.header("authorization").is_some() {
            self.done.lock().unwrap().push(format!("LEAKED: {}", request.line()));
        }
    }
}

fn is_blob(request: &Request) -> bool {
    request.method == "GET" && request.path.contains("/blobs/sha256:")
}

/// A registry behind bad weather.
struct Proxy {
    server: Server,
    weather: Arc<Weather>,
}

impl Proxy {
    fn start(upstream: &str, seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let chance = [4, 15, 40, 80][dice.below(4)];
        let token_life =
            (dice.below(2) == 0).then(|| Duration::from_millis(100 + dice.below(300) as u64));
        let weather: Arc<std::sync::OnceLock<Arc<Weather>>> = Arc::default();
        let storage = Arc::clone(&weather);
        let elsewhere = Server::start(move |request, _| {
            let weather = storage.get().unwrap();
            weather.check_nobody(request);
            let path = request.path.strip_prefix("/storage?").unwrap_or_default();
            match path.strip_suffix("&expired") {
                Some(_) => reply(403).body("<Error><Code>AccessDenied</Code></Error>"),
                None => weather.upstream(&Request { path: path.to_owned(), ..request.clone() }),
            }
        });
        let made = Arc::new(Weather {
            seed,
            chance,
            token_life,
            upstream: upstream.to_owned(),
            count: Mutex::default(),
            tokens: Mutex::default(),
            elsewhere: elsewhere.host(),
            done: Mutex::default(),
        });
        assert!(weather.set(Arc::clone(&made)).is_ok());
        let weather = Arc::clone(&made);
        Self { server: Server::start(move |request, _| made.answer(request)), weather }
    }

    fn done(&self) -> Vec<String> {
        self.weather.done.lock().unwrap().clone()
    }
}

/// What errors may say of what happened. One that has nothing of these leaves people in the dark.
const CAUSES: [&str; 15] = [
    "it answers with status 5",
    "limits the rate of requests",
    "the connection broke (",
    "the content ended after ",
    "the content goes on after ",
    "the server announces ",
    "the server sends \"",
    "nothing came for ",
    "access is denied",
    "has the digest ",
    "but the server calls it ",
    "has no right copy of ",
    "no credentials for ",
    "cannot use its answer",
    "has lost the upload after ",
];

/// That an error says what was asked of whom, and what came of it.
fn check_error(text: &str, host: &str) {
    assert!(text.contains(host), "which host? {text}");
    assert!(["sha256:", "manifest", "config"].iter().any(|it| text.contains(it)), "what? {text}");
    assert!(CAUSES.iter().any(|it| text.contains(it)), "why? {text}");
}

static SMALL: LazyLock<Arc<Served>> = LazyLock::new(|| {
    Arc::new(served(vec![layer("a", 2_500_000), layer("b", 10_000), layer("c", 1_200_000)]))
});
/// With a layer that is sent in two chunks.
static LARGE: LazyLock<Arc<Served>> =
    LazyLock::new(|| Arc::new(served(vec![layer("a", 17 << 20), layer("b", 10_000)])));

fn pull_through(
    home: &Home,
    host: &str,
    layers: Layers,
    settings: &Settings,
) -> Result<Pulled, PullError> {
    let reference: Reference = format!("{host}/app:1").parse().unwrap();
    let name = default_name(&reference).unwrap();
    let import = oci::import::Options { name: Some(&name), ..home.import_options() };
    let policies = oci::policy::Policies::load(&[]).unwrap();
    let options = oci::pull::Options { import, layers, policies: &policies };
    pull(&home.store, &Registry::new(&reference, settings).unwrap(), &reference, &options)
}

/// Whatever names there are stand for the whole image, and all that is there is sound.
fn check_store(home: &Home, expected: &ObjectId) {
    for (name, reference) in home.store.refs().unwrap() {
        assert_eq!(reference.image, *expected, "{name}");
        home.store.open_image(expected).unwrap();
    }
    assert!(home.is_sound());
}

/// Pulls through bad weather until it succeeds or three times, then without: gives how often it succeeded.
fn pulls(upstream: &Daemon, seed: u64, expected: &ObjectId) -> usize {
    let proxy = Proxy::start(&upstream.host, seed);
    let host = proxy.server.host();
    let home = Home::new();
    let layers = if seed.is_multiple_of(3) { Layers::Keep } else { Layers::Forget };
    let mut successes = 0;
    for _ in 0..3 {
        match pull_through(&home, &host, layers, &impatient()) {
            Ok(pulled) => {
                successes += 1;
                assert_eq!(image(Ok(pulled)), *expected);
            }
            Err(error) => {
                println!("{seed}: {}", chain(&error));
                check_error(&chain(&error), &host);
                assert!(home.store.refs().unwrap().is_empty(), "{}", chain(&error));
            }
        }
        check_store(&home, expected);
        if successes > 0 {
            break;
        }
        // Whoever tidies up meanwhile takes nothing away that the next pull goes on with.
        home.store.gc(NOW).unwrap();
    }
    let done = proxy.done();
    assert!(!done.iter().any(|it| it.starts_with("LEAKED")), "{done:?}");
    let calm = pull_through(&home, &upstream.host, layers, &settings());
    assert_eq!(image(calm), *expected);
    check_store(&home, expected);
    let kept = if layers == Layers::Keep { 3 } else { 0 };
    let blobs = home.blobs();
    assert_eq!(blobs.iter().filter(|it| it.is_empty()).count(), kept, "{blobs:?}");
    assert!(!blobs.iter().any(|it| it == ".partial" || it == ".pull"), "{blobs:?}");
    successes
}

/// The same with pushes of what is kept in `home` as `pulled`.
fn pushes(upstream: &Daemon, seed: u64, home: &Home, pulled: &str, what: &Served) -> usize {
    let proxy = Proxy::start(&upstream.host, seed);
    let host = proxy.server.host();
    let repository = format!("push/{seed}");
    let there: Reference = format!("{}/{repository}", upstream.host).parse().unwrap();
    let there = Registry::new(&there, &settings()).unwrap();
    let blobs: BTreeSet<_> =
        what.layers.iter().map(|it| &it.blob).chain([&what.config]).map(|it| digest(it)).collect();
    let is_there = || {
        let manifest = match there.manifest("1") {
            Err(error) if error.is_not_found() => return false,
            manifest => manifest.unwrap(),
        };
        assert_eq!(manifest.bytes, what.manifest);
        for blob in &blobs {
            let bytes = read(there.blob(blob, None, 0)).unwrap();
            assert_eq!(digest(&bytes), *blob, "a manifest is there before its blobs");
        }
        true
    };
    let mut successes = 0;
    for _ in 0..3 {
        let target = format!("{host}/{repository}:1");
        match push_over(home, pulled, &target, &[], &impatient()) {
            Ok(pushed) => {
                assert_eq!((pushed.digest, pushed.is_unchanged), (digest(&what.manifest), true));
                assert!(is_there());
                successes += 1;
                break;
            }
            Err(PushError::Registry { target, source }) => {
                let error = PushError::Registry { target, source };
                println!("{seed}: {}", chain(&error));
                check_error(&chain(&error), &host);
                // It may be there: perhaps only the last answer was lost.
                is_there();
            }
            Err(other) => panic!("{}", chain(&other)),
        }
    }
    let done = proxy.done();
    assert!(!done.iter().any(|it| it.starts_with("LEAKED")), "{done:?}");
    push_to(home, pulled, &format!("{}/{repository}:1", upstream.host), &[]);
    assert!(is_there());
    successes
}

/// Runs `round` with many seeds, and says which one failed.
fn weather(first: u64, few: u64, round: impl Fn(u64) -> usize) {
    let mut successes = 0;
    for seed in first..first + rounds(few) {
        let since = Instant::now();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| round(seed)));
        match outcome {
            Ok(count) => {
                successes += count;
                println!("{seed}: {count} after {:.1} s", since.elapsed().as_secs_f64());
            }
            Err(panic) => {
                println!("the seed is {seed}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    assert!(successes > 0, "the weather is too bad to learn anything");
}

#[test]
fn pulls_in_bad_weather() {
    let Some(daemon) = real::start("") else { return };
    SMALL.put(&daemon.host);
    let expected = Home::new().imported(&SMALL);
    weather(0, 8, |seed| pulls(&daemon, seed, &expected));
}

#[test]
fn pulls_in_bad_weather_from_crane() {
    let Some(daemon) = real::start_crane() else { return };
    SMALL.put(&daemon.host);
    let expected = Home::new().imported(&SMALL);
    weather(1000, 4, |seed| pulls(&daemon, seed, &expected));
}

#[test]
fn pushes_in_bad_weather() {
    let Some(daemon) = real::start("") else { return };
    pushes_to(&daemon, 2000, 4);
}

#[test]
fn pushes_in_bad_weather_to_crane() {
    let Some(daemon) = real::start_crane() else { return };
    // It has one heap of blobs for all repositories, so that after the first round only the manifest is sent.
    pushes_to(&daemon, 3000, 2);
}

fn pushes_to(daemon: &Daemon, first: u64, few: u64) {
    let truths = [Arc::clone(&SMALL), Arc::clone(&LARGE)];
    let kept = truths.map(|truth| {
        let (home, answers) = (Home::new(), Arc::clone(&truth));
        let server = Server::start(move |request, _| answers.answer(request));
        image(home.pull_as(&server.host(), Layers::Keep));
        (truth, home, format!("{}/app:1", server.host()))
    });
    weather(first, few, |seed| {
        let (truth, home, name) = &kept[usize::from(seed.is_multiple_of(4))];
        pushes(daemon, seed, home, name, truth)
    });
}
