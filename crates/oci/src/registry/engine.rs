//! The network thread, and how other threads wait for it.

use std::io;
use std::sync::Arc;
use std::task::Poll;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::{Cause, Core, Registry, RegistryError};

/// A thread with a tokio runtime. Dropping it also drops all unfinished work.
pub(super) struct Engine {
    handle: Handle,
    _stop: oneshot::Sender<()>,
}

impl Engine {
    pub(super) fn start() -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        std::thread::Builder::new().name("registry".to_owned()).spawn(move || {
            // The sender is never used, only dropped.
            let _ended = runtime.block_on(stopped);
            // The shutdown does not wait for a credential helper that may still run.
            runtime.shutdown_background();
        })?;
        Ok(Self { handle, _stop: stop })
    }

    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        drop(self.handle.spawn(work));
    }
}

/// Returns the output of the future that finishes first, and drops the other.
pub(super) async fn first<T>(one: impl Future<Output = T>, other: impl Future<Output = T>) -> T {
    let (mut one, mut other) = (std::pin::pin!(one), std::pin::pin!(other));
    std::future::poll_fn(|context| match one.as_mut().poll(context) {
        Poll::Ready(value) => Poll::Ready(value),
        Poll::Pending => other.as_mut().poll(context),
    })
    .await
}

impl Registry {
    /// Runs `work` on the network thread, and waits for it.
    pub(super) fn run<T, W>(
        &self,
        what: &str,
        work: impl FnOnce(Arc<Core>) -> W,
    ) -> Result<T, RegistryError>
    where
        T: Send + 'static,
        W: Future<Output = Result<T, RegistryError>> + Send + 'static,
    {
        let core = Arc::clone(&self.core);
        let work = work(Arc::clone(&core));
        let (sender, receiver) = oneshot::channel();
        self.engine.spawn(async move {
            let cancelled = async {
                core.cancelled().await;
                None
            };
            let result = first(async { Some(work.await) }, cancelled).await;
            // The caller waits for this result below.
            let _sent = sender.send(result);
        });
        // If the sender was dropped, the thread has panicked, which has been printed.
        let cancelled = || RegistryError::new(what, &self.core.registry, 1, Cause::Cancelled);
        receiver.blocking_recv().ok().flatten().unwrap_or_else(|| Err(cancelled()))
    }
}
