"""Training steps of usual projects, one in each cell: ``train`` is estimated, and run.

``training_steps.py`` runs each cell after the imports, as notebook code.
"""

# ruff: noqa: B905, F811, N812
import copy
import math

import torch
from torch import nn
from torch.distributions import Categorical
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


# %% LoRA
class LoRA(nn.Module):
    def __init__(self, base, r=8, alpha=16, p=0.05):
        super().__init__()
        self.base = base
        for q in base.parameters():
            q.requires_grad_(False)
        self.a = nn.Linear(base.in_features, r, bias=False)
        self.b = nn.Linear(r, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)
        self.drop = nn.Dropout(p)
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + self.b(self.a(self.drop(x))) * self.scale


layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True)
model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to("cuda")
for q in model.parameters():
    q.requires_grad_(False)
for each in model.layers:
    each.linear1 = LoRA(each.linear1)
    each.linear2 = LoRA(each.linear2)
model.to("cuda")
opt = torch.optim.AdamW([q for q in model.parameters() if q.requires_grad], lr=1e-4)


def train():
    for _ in range(3):
        x = torch.randn(16, 128, 256, device="cuda")
        loss = model(x).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)


# %% accumulated gradients and a scaler
model = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.Conv2d(64, 128, 3, stride=2, padding=1),
    nn.BatchNorm2d(128),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(2048, 100),
).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
scaler = torch.amp.GradScaler("cuda")
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=100)


def train():
    for step in range(8):
        x = torch.randn(32, 3, 64, 64, device="cuda")
        y = torch.randint(0, 100, (32,), device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1) / 4
        scaler.scale(loss).backward()
        if (step + 1) % 4 == 0:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            sched.step()


# %% GAN
G = nn.Sequential(
    nn.ConvTranspose2d(64, 256, 4),
    nn.BatchNorm2d(256),
    nn.ReLU(),
    nn.ConvTranspose2d(256, 128, 4, 2, 1),
    nn.BatchNorm2d(128),
    nn.ReLU(),
    nn.ConvTranspose2d(128, 3, 4, 2, 1),
    nn.Tanh(),
).cuda()
D = nn.Sequential(
    nn.Conv2d(3, 64, 4, 2, 1),
    nn.LeakyReLU(0.2, True),
    nn.Conv2d(64, 128, 4, 2, 1),
    nn.BatchNorm2d(128),
    nn.LeakyReLU(0.2, True),
    nn.Flatten(),
    nn.Linear(2048, 1),
).cuda()
og = torch.optim.Adam(G.parameters(), 2e-4, betas=(0.5, 0.999))
od = torch.optim.Adam(D.parameters(), 2e-4, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()


def train():
    for _ in range(2):
        real = torch.randn(64, 3, 16, 16, device="cuda")
        z = torch.randn(64, 64, 1, 1, device="cuda")
        fake = G(z)
        od.zero_grad()
        ld = bce(D(real), torch.ones(64, 1, device="cuda")) + bce(
            D(fake.detach()), torch.zeros(64, 1, device="cuda")
        )
        ld.backward()
        od.step()
        og.zero_grad()
        lg = bce(D(fake), torch.ones(64, 1, device="cuda"))
        lg.backward()
        og.step()


# %% a penalty of gradients
D = nn.Sequential(
    nn.Linear(784, 512),
    nn.LeakyReLU(0.2),
    nn.Linear(512, 256),
    nn.LeakyReLU(0.2),
    nn.Linear(256, 1),
).cuda()
opt = torch.optim.RMSprop(D.parameters())


def train():
    for _ in range(2):
        real = torch.randn(256, 784, device="cuda")
        fake = torch.randn(256, 784, device="cuda")
        eps = torch.rand(256, 1, device="cuda")
        mid = (eps * real + (1 - eps) * fake).requires_grad_(True)
        out = D(mid)
        (g,) = torch.autograd.grad(
            out, mid, torch.ones_like(out), create_graph=True, retain_graph=True
        )
        loss = D(fake).mean() - D(real).mean() + 10 * ((g.norm(2, dim=1) - 1) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


# %% a growing cache
class Attn(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv = nn.Linear(d, 3 * d)
        self.o = nn.Linear(d, d)

    def forward(self, x, cache):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k = torch.cat([cache[0], k], 2)
            v = torch.cat([cache[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return self.o(y.transpose(1, 2).reshape(b, t, d)), (k, v)


class LM(nn.Module):
    def __init__(self, d=512, h=8, n=4, vocab=8000):
        super().__init__()
        self.e = nn.Embedding(vocab, d)
        self.at = nn.ModuleList(Attn(d, h) for _ in range(n))
        self.ff = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.SiLU(), nn.Linear(4 * d, d))
            for _ in range(n)
        )
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids, caches):
        x = self.e(ids)
        new = []
        for a, f, c in zip(self.at, self.ff, caches):
            y, c = a(x, c)
            new.append(c)
            x = x + y
            x = x + f(x)
        return self.head(x[:, -1]), new


model = LM().to("cuda", torch.bfloat16).eval()


@torch.inference_mode()
def train():
    ids = torch.randint(0, 8000, (4, 64), device="cuda")
    caches = [None] * 4
    out = ids
    for _ in range(24):
        logits, caches = model(ids, caches)
        probs = torch.softmax(logits.float() / 0.8, -1)
        top, at = probs.topk(50)
        ids = at.gather(1, torch.multinomial(top, 1))
        out = torch.cat([out, ids], 1)


# %% a contrastive loss
img = nn.Sequential(
    nn.Conv2d(3, 64, 7, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 256)
).cuda()
txt = nn.Sequential(nn.EmbeddingBag(10000, 256), nn.Linear(256, 256)).cuda()
t = nn.Parameter(torch.tensor(2.6, device="cuda"))
opt = torch.optim.AdamW([*img.parameters(), *txt.parameters(), t], fused=True)


def train():
    for _ in range(2):
        x = torch.randn(256, 3, 64, 64, device="cuda")
        ids = torch.randint(0, 10000, (256, 20), device="cuda")
        a = F.normalize(img(x), dim=-1)
        b = F.normalize(txt(ids), dim=-1)
        s = t.exp() * a @ b.t()
        y = torch.arange(256, device="cuda")
        loss = (F.cross_entropy(s, y) + F.cross_entropy(s.t(), y)) / 2
        opt.zero_grad()
        loss.backward()
        opt.step()


# %% diffusion
class Res(nn.Module):
    def __init__(self, i, o, t):
        super().__init__()
        self.n1 = nn.GroupNorm(8, i)
        self.c1 = nn.Conv2d(i, o, 3, padding=1)
        self.t = nn.Linear(t, o)
        self.n2 = nn.GroupNorm(8, o)
        self.c2 = nn.Conv2d(o, o, 3, padding=1)
        self.s = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(self, x, t):
        h = self.c1(F.silu(self.n1(x))) + self.t(F.silu(t))[:, :, None, None]
        return self.c2(F.silu(self.n2(h))) + self.s(x)


class UNet(nn.Module):
    def __init__(self, c=64):
        super().__init__()
        self.te = nn.Sequential(nn.Linear(c, 4 * c), nn.SiLU(), nn.Linear(4 * c, 4 * c))
        self.c = c
        self.i = nn.Conv2d(3, c, 3, padding=1)
        self.d1 = Res(c, c, 4 * c)
        self.p1 = nn.Conv2d(c, c, 3, 2, 1)
        self.d2 = Res(c, 2 * c, 4 * c)
        self.m = Res(2 * c, 2 * c, 4 * c)
        self.u2 = Res(4 * c, 2 * c, 4 * c)
        self.u1 = Res(3 * c, c, 4 * c)
        self.o = nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, x, t):
        f = torch.exp(-math.log(10000) * torch.arange(self.c // 2, device=x.device) / (self.c // 2))
        e = t[:, None] * f[None]
        t = self.te(torch.cat([e.sin(), e.cos()], -1))
        h0 = self.d1(self.i(x), t)
        h1 = self.d2(self.p1(h0), t)
        h = self.m(h1, t)
        h = self.u2(torch.cat([h, h1], 1), t)
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        h = self.u1(torch.cat([h, h0], 1), t)
        return self.o(h)


model = UNet().cuda()
ema = copy.deepcopy(model).requires_grad_(False)
opt = torch.optim.AdamW(model.parameters(), 1e-4)
ab = torch.linspace(0.999, 0.01, 1000, device="cuda").cumprod(0)


def train():
    for _ in range(2):
        x = torch.randn(8, 3, 32, 32, device="cuda")
        t = torch.randint(0, 1000, (8,), device="cuda")
        n = torch.randn_like(x)
        a = ab[t].view(-1, 1, 1, 1)
        xt = a.sqrt() * x + (1 - a).sqrt() * n
        loss = F.mse_loss(model(xt, t.float()), n)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        with torch.no_grad():
            for p, q in zip(ema.parameters(), model.parameters()):
                p.lerp_(q, 0.001)


# %% sparse embeddings
emb = nn.Embedding(200000, 64, sparse=True).cuda()
head = nn.Linear(64, 1).cuda()
o1 = torch.optim.SparseAdam(emb.parameters())
o2 = torch.optim.Adagrad(head.parameters())


def train():
    for _ in range(2):
        u = torch.randint(0, 200000, (1024, 2), device="cuda")
        e = emb(u)
        s = head(e[:, 0] * e[:, 1]).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(s, torch.rand(1024, device="cuda"))
        o1.zero_grad()
        o2.zero_grad()
        loss.backward()
        o1.step()
        o2.step()


# %% LBFGS
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)).cuda()
opt = torch.optim.LBFGS(model.parameters(), max_iter=5, history_size=5)
x = torch.randn(2048, 64, device="cuda")
y = torch.randn(2048, 1, device="cuda")


def train():
    def closure():
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        opt.step(closure)


# %% averaged weights
model = nn.Sequential(
    nn.Linear(1024, 2048), nn.GELU(), nn.LayerNorm(2048), nn.Linear(2048, 1024)
).cuda()
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
opt = torch.optim.NAdam(model.parameters())


def train():
    for _ in range(3):
        x = torch.randn(256, 1024, device="cuda")
        loss = F.l1_loss(model(x), x)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update_parameters(model)


# %% Muon
model = nn.Sequential(
    nn.Linear(1024, 2048, bias=False), nn.GELU(), nn.Linear(2048, 1024, bias=False)
).cuda()
opt = torch.optim.Muon(model.parameters())


def train():
    for _ in range(2):
        x = torch.randn(256, 1024, device="cuda")
        loss = F.l1_loss(model(x), x)
        opt.zero_grad()
        loss.backward()
        opt.step()


# %% triplets
model = nn.Sequential(nn.Linear(784, 512), nn.PReLU(), nn.Linear(512, 128)).cuda()
opt = torch.optim.RAdam(model.parameters())


def train():
    for _ in range(2):
        e = F.normalize(model(torch.randn(256, 784, device="cuda")), dim=1)
        y = torch.arange(256, device="cuda") // 4
        d = torch.cdist(e, e)
        same = y[:, None] == y[None]
        pos = d.masked_fill(~same, -1).max(1).values
        neg = d.masked_fill(same, 1e9).min(1).values
        loss = F.relu(pos - neg + 0.2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


# %% a code book
enc = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 4, 2, 1)).cuda()
dec = nn.Sequential(
    nn.ConvTranspose2d(64, 64, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(64, 3, 4, 2, 1)
).cuda()
book = nn.Embedding(512, 64).cuda()
opt = torch.optim.Adam([*enc.parameters(), *dec.parameters(), *book.parameters()])


def train():
    for _ in range(2):
        x = torch.randn(16, 3, 64, 64, device="cuda")
        z = enc(x)
        flat = z.permute(0, 2, 3, 1).reshape(-1, 64)
        d = (
            flat.pow(2).sum(1, keepdim=True)
            - 2 * flat @ book.weight.t()
            + book.weight.pow(2).sum(1)
        )
        q = book(d.argmin(1)).view(16, 16, 16, 64).permute(0, 3, 1, 2)
        loss = (
            F.mse_loss(dec(z + (q - z).detach()), x)
            + F.mse_loss(q, z.detach())
            + 0.25 * F.mse_loss(z, q.detach())
        )
        opt.zero_grad()
        loss.backward()
        opt.step()


# %% PPO
pi = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)).cuda()
v = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)).cuda()
opt = torch.optim.Adam([*pi.parameters(), *v.parameters()], eps=1e-5)


def train():
    with torch.no_grad():
        obs = torch.randn(4096, 64, device="cuda")
        dist = Categorical(logits=pi(obs), validate_args=False)
        act = dist.sample()
        old = dist.log_prob(act)
        val = v(obs).squeeze(1)
    adv = torch.randn(4096, device="cuda")
    ret = adv + val
    for _ in range(2):
        for idx in torch.randperm(4096, device="cuda").split(1024):
            dist = Categorical(logits=pi(obs[idx]), validate_args=False)
            ratio = (dist.log_prob(act[idx]) - old[idx]).exp()
            loss = (
                -torch.min(ratio * adv[idx], ratio.clamp(0.8, 1.2) * adv[idx]).mean()
                + 0.5 * F.mse_loss(v(obs[idx]).squeeze(1), ret[idx])
                - 0.01 * dist.entropy().mean()
            )
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(pi.parameters(), 0.5)
            opt.step()


# %% momentum contrast
q = nn.Sequential(
    nn.Conv2d(3, 64, 7, 2, 3),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.MaxPool2d(3, 2, 1),
    nn.Conv2d(64, 128, 3, 2, 1),
    nn.BatchNorm2d(128),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(128, 128),
).cuda()
k = copy.deepcopy(q).requires_grad_(False)
queue = F.normalize(torch.randn(128, 16384, device="cuda"), dim=0)
opt = torch.optim.SGD(q.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)


def train():
    for step in range(2):
        a = torch.randn(64, 3, 64, 64, device="cuda")
        b = a + 0.1
        x = F.normalize(q(a), dim=1)
        with torch.no_grad():
            for p, r in zip(k.parameters(), q.parameters()):
                p.data = p.data * 0.999 + r.data * 0.001
            y = F.normalize(k(b[torch.randperm(64, device="cuda")]), dim=1)
        logits = (
            torch.cat(
                [
                    torch.einsum("nc,nc->n", x, y).unsqueeze(-1),
                    torch.einsum("nc,ck->nk", x, queue.clone().detach()),
                ],
                1,
            )
            / 0.07
        )
        loss = F.cross_entropy(logits, torch.zeros(64, dtype=torch.long, device="cuda"))
        opt.zero_grad()
        loss.backward()
        opt.step()
        queue[:, step * 64 : (step + 1) * 64] = y.t()


# %% MAML
model = nn.Sequential(
    nn.Linear(1, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)
).cuda()
opt = torch.optim.Adam(model.parameters())


def train():
    for _ in range(2):
        opt.zero_grad()
        for _ in range(4):
            x = torch.rand(64, 1, device="cuda")
            y = x.sin()
            fast = dict(model.named_parameters())
            for _ in range(3):
                loss = F.mse_loss(functional_call(model, fast, (x,)), y)
                g = torch.autograd.grad(loss, tuple(fast.values()), create_graph=True)
                fast = {n: p - 0.01 * d for (n, p), d in zip(fast.items(), g)}
            (F.mse_loss(functional_call(model, fast, (x,)), y) / 4).backward()
        opt.step()


# %% packed sequences
e = nn.Embedding(5000, 128).cuda()
r = nn.LSTM(128, 256, 2, batch_first=True, bidirectional=True, dropout=0.1).cuda()
h = nn.Linear(512, 5000).cuda()
opt = torch.optim.Adadelta([*e.parameters(), *r.parameters(), *h.parameters()])


def train():
    for _ in range(2):
        n = torch.tensor(list(range(40, 8, -1)))
        ids = torch.randint(0, 5000, (32, 40), device="cuda")
        out, _ = pad_packed_sequence(
            r(pack_padded_sequence(e(ids), n, batch_first=True))[0], batch_first=True
        )
        loss = F.cross_entropy(h(out).transpose(1, 2), ids)
        opt.zero_grad()
        loss.backward()
        opt.step()


# %% packed sequences of unknown lengths
e = nn.Embedding(5000, 128).cuda()
r = nn.LSTM(128, 256, 2, batch_first=True, bidirectional=True, dropout=0.1).cuda()
h = nn.Linear(512, 5000).cuda()
opt = torch.optim.Adadelta([*e.parameters(), *r.parameters(), *h.parameters()])


def train():
    for _ in range(2):
        n = torch.arange(40, 8, -1)
        ids = torch.randint(0, 5000, (32, 40), device="cuda")
        out, _ = pad_packed_sequence(
            r(pack_padded_sequence(e(ids), n, batch_first=True))[0], batch_first=True
        )
        loss = F.cross_entropy(h(out).transpose(1, 2), ids)
        opt.zero_grad()
        loss.backward()
        opt.step()


# %% a graph
class GCN(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.l = nn.Linear(i, o)

    def forward(self, x, s, d):
        m = self.l(x)
        out = torch.zeros_like(m).index_add_(0, d, m[s])
        deg = torch.zeros(x.shape[0], device=x.device).scatter_add_(
            0, d, torch.ones_like(d, dtype=torch.float)
        )
        return out / deg.clamp(min=1)[:, None]


a, b = GCN(128, 256).cuda(), GCN(256, 40).cuda()
opt = torch.optim.Adam([*a.parameters(), *b.parameters()])
x = torch.randn(20000, 128, device="cuda")
s, d = torch.randint(0, 20000, (2, 200000), device="cuda")
y = torch.randint(0, 40, (20000,), device="cuda")
mask = torch.rand(20000, device="cuda") < 0.1


def train():
    for _ in range(2):
        out = b(F.dropout(a(x, s, d).relu(), 0.5), s, d)
        loss = F.nll_loss(out.log_softmax(1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()


# %% a mixture of experts
gate = nn.Linear(256, 8).cuda()
w1 = nn.Parameter(torch.randn(8, 256, 1024, device="cuda") * 0.02)
w2 = nn.Parameter(torch.randn(8, 1024, 256, device="cuda") * 0.02)
opt = torch.optim.AdamW([w1, w2, *gate.parameters()])


def train():
    for _ in range(2):
        x = torch.randn(2048, 256, device="cuda")
        p = gate(x).softmax(-1)
        h = torch.einsum("td,edf->etf", x, w1).relu()
        y = torch.einsum("etf,efd,te->td", h, w2, p)
        loss = (y - x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


# %% stacked networks
nets = [nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).cuda() for _ in range(16)]
weights, _ = stack_module_state(nets)
weights = {name: weight.detach() for name, weight in weights.items()}


def loss_of(weights, x, y):
    return F.cross_entropy(functional_call(nets[0], weights, (x,)), y)


def train():
    x = torch.randn(4096, 256, device="cuda")
    y = torch.randint(10, (4096,), device="cuda")
    vmap(grad(loss_of), (0, None, None))(weights, x, y)
