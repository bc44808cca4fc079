"""Sound for the pitch demo: a synthetic clip with a known pitch, framing, .wav files, decoding.

Framing and pitch scale are CREPE's (https://github.com/marl/crepe, MIT): 16 kHz, frames of 1,024
samples every 10 ms, bin i at 20·i + 1997.3794 cents above 10 Hz. Everything here is numpy.
"""

import math
import wave

import numpy as np

from onchip.errors import OnchipError

RATE = 16_000
HOP = 160
WINDOW = 1024
CENTS = 20.0 * np.arange(360) + 1997.3794084376191


def sung_tone(seconds: float = 3.0, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A sung-like clip at 16 kHz and its true pitch in Hz, both [samples].

    Pitch glides through notes between 196 and 330 Hz with a vibrato of 5.5 Hz and ±30 cents; twelve
    harmonics fall off as 1/k with a formant-like bump, plus noise 30 dB below the tone.
    """
    random = np.random.default_rng(seed)
    time = np.arange(round(seconds * RATE)) / RATE
    notes = np.array([220.0, 246.94, 261.63, 293.66, 329.63, 293.66, 246.94, 196.0])
    beat = (time / 0.6) % len(notes)  # a note every 0.6 s, gliding during its last quarter
    low = notes[beat.astype(int)]
    high = notes[(beat.astype(int) + 1) % len(notes)]
    glide = np.clip((beat % 1 - 0.75) / 0.25, 0, 1)
    glide = glide * glide * (3 - 2 * glide)
    vibrato = 30 / 1200 * np.sin(2 * np.pi * 5.5 * time)
    pitch = low * (high / low) ** glide * 2**vibrato
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    clip = np.zeros_like(time)
    for k in range(1, 13):
        formant = 1 + 2 * np.exp(-(((k * pitch - 700) / 250) ** 2))
        clip += formant / k * np.sin(k * phase + random.uniform(0, 2 * np.pi))
    clip *= 0.3 / max(float(np.sqrt(np.mean(clip**2))), 1e-12)
    clip += 0.3 * 10 ** (-30 / 20) * random.standard_normal(len(clip))
    return clip.astype(np.float32), pitch


def frame(clip: np.ndarray, *, hop: int = HOP) -> np.ndarray:
    """[samples] → normalised frames [1 + samples // hop, 1024]; frame i is centred at i·hop."""
    padded = np.pad(clip.astype(np.float32), WINDOW // 2)
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::hop]
    frames = frames[: 1 + len(clip) // hop]
    frames = frames - frames.mean(axis=1, keepdims=True)
    deviation = frames.std(axis=1, ddof=1, keepdims=True)
    return (frames / np.maximum(deviation, 1e-10)).astype(np.float32)


def read_wav(path: str) -> np.ndarray:
    """A 16-bit PCM .wav, mono or stereo, at any rate → float32 in -1..1, mono, 16 kHz."""
    try:
        with wave.open(path, "rb") as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            data = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise OnchipError(f"{path}: not a readable .wav file ({error})") from error
    if width != 2 or channels not in (1, 2):
        text = f"{8 * width} bits and {channels} channels"
        raise OnchipError(f"{path}: has {text}; convert it to 16-bit PCM, mono or stereo")
    clip = np.frombuffer(data, dtype="<i2").reshape(-1, channels).mean(axis=1) / 32768
    return resample(clip, rate)


def resample(clip: np.ndarray, rate: int) -> np.ndarray:
    """From `rate` to 16 kHz with scipy's polyphase filter."""
    if rate == RATE:
        return clip.astype(np.float32)
    from scipy.signal import resample_poly

    common = math.gcd(RATE, rate)
    return resample_poly(clip, RATE // common, rate // common).astype(np.float32)


def decode(salience: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Salience [frames, 360] → pitch in Hz and confidence 0..1, both [frames].

    As CREPE: the salience-weighted mean of the nine bins around the largest one.
    """
    salience = np.asarray(salience, dtype=np.float64)
    centre = salience.argmax(axis=1)
    near = np.abs(np.arange(salience.shape[1]) - centre[:, None]) <= 4
    weight = np.where(near, salience, 0.0)
    total = np.maximum(weight.sum(axis=1), 1e-30)
    cents = (weight * CENTS).sum(axis=1) / total
    return 10 * 2 ** (cents / 1200), salience.max(axis=1)


def cents_between(found: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Signed distance in cents, a hundredth of a semitone."""
    return 1200 * np.log2(np.asarray(found) / np.asarray(true))
