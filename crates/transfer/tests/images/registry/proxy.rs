//! A proxy in front of a registry that simulates faults of networks, registries and proxies, according to a plan made
//! from a seed.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher as _};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::digest;
use testing::fake::{Reply, Request, Server, forward, reply};
use testing::noise;

/// Random numbers that depend only on `seed`.
struct Dice(u64);

impl Dice {
    fn new(seed: impl std::hash::Hash) -> Self {
        let mut hasher = DefaultHasher::new();
        seed.hash(&mut hasher);
        Self(hasher.finish() | 1)
    }

    /// Returns a number from 0 to `bound - 1`.
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from((self.0 >> 16) % bound.max(1) as u64).unwrap()
    }
}

/// A fault of a request.
#[derive(Debug, Clone, Copy)]
enum Trouble {
    Delay,
    Slow,
    RateLimit,
    Status(u16),
    /// A status after the registry has executed the request.
    LateStatus(u16),
    /// The registry gets only a part of the body.
    Lost,
    ResetBefore,
    ResetAfter,
    ResetWithin,
    Truncated,
    Stall,
    /// The response is longer than the content.
    Longer,
    /// `Content-Length` is too large, or too small.
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

/// The plan of a proxy, and its records.
struct Weather {
    seed: u64,
    /// Number of faulty requests per hundred.
    chance: usize,
    /// Lifetime of tokens, if any. Responses do not state it.
    token_life: Option<Duration>,
    upstream: String,
    /// Number of requests for each path.
    count: Mutex<BTreeMap<String, u64>>,
    tokens: Mutex<Vec<Instant>>,
    /// Host that blobs are redirected to.
    elsewhere: String,
    /// Faults so far, for the analysis of a failed test.
    done: Mutex<Vec<String>>,
    /// Requests to the other host that contain credentials for the registry.
    leaked: Mutex<Vec<String>>,
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
                // The registry's response is dropped.
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
        let mut answer = self.upstream(request);
        let length = answer.body.len();
        match trouble {
            Trouble::Delay => {
                return answer.delay(Duration::from_millis(20 + dice.below(150) as u64));
            }
            Trouble::Slow => return answer.pace(Duration::from_millis(2)),
            Trouble::LateStatus(status) => return reply(status),
            Trouble::ResetAfter => return answer.reset(None),
            Trouble::ResetWithin => return answer.reset(Some(dice.below(length))),
            Trouble::Truncated => return answer.cut(dice.below(length)),
            Trouble::Stall => return answer.stall(dice.below(length)),
            Trouble::Longer => {
                answer.body.extend(noise(1 + dice.below(70_000)));
                if dice.below(2) == 0 {
                    return answer.header("connection", "close");
                }
            }
            Trouble::Announced(is_more) if request.method != "HEAD" => {
                let lie = match is_more {
                    true => length + 1 + dice.below(9999),
                    false => dice.below(length),
                };
                return answer.header("content-length", &lie.to_string()).cut(length);
            }
            Trouble::Flipped if length > 0 => {
                let at = dice.below(length);
                answer.body[at] ^= 1 << dice.below(8);
            }
            Trouble::WrongDigest => {
                answer.headers.retain(|(name, _)| name != "docker-content-digest");
                return answer.header("docker-content-digest", &digest(b"another").to_string());
            }
            _ => {}
        }
        answer
    }

    /// Returns a token, which is its serial number.
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

    /// Checks that credentials for the registry are not sent to another host.
    fn check_nobody(&self, request: &Request) {
        if request.header("authorization").is_some() {
            self.leaked.lock().unwrap().push(request.line());
        }
    }
}

pub(crate) fn is_blob(request: &Request) -> bool {
    request.method == "GET" && request.path.contains("/blobs/sha256:")
}

/// A registry behind a faulty network.
pub(crate) struct Proxy {
    pub(crate) server: Server,
    weather: Arc<Weather>,
}

impl Proxy {
    pub(crate) fn start(upstream: &str, seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let chance = [4, 15, 40, 80][dice.below(4)];
        let token_life =
            (dice.below(2) == 0).then(|| Duration::from_millis(100 + dice.below(300) as u64));
        let weather: Arc<OnceLock<Arc<Weather>>> = Arc::default();
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
            leaked: Mutex::default(),
        });
        assert!(weather.set(Arc::clone(&made)).is_ok());
        let weather = Arc::clone(&made);
        Self { server: Server::start(move |request, _| made.answer(request)), weather }
    }

    /// Checks that no other host got the credentials.
    pub(crate) fn check(&self) {
        let leaked = self.weather.leaked.lock().unwrap();
        assert!(leaked.is_empty(), "{leaked:?}");
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("the proxy did: {:#?}", self.weather.done);
        }
    }
}
